"""A layer's tensors are complete, of the declared shapes and dtypes, and their indices in range.

These are the checks that loading makes; here all layers are asked, and every error is kept.
"""

from collections.abc import Iterator

from qload.errors import QloadError, UnsupportedFormatError
from qload.spec import named
from qload.verify.report import Finding, finding_of
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

# The ids under which an error of the loader is reported.
IDS = ("missing-tensor", "tensor-shape", "tensor-dtype", "index-range", "index-ambiguous", "two-formats")


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Report every layer that cannot be loaded, with the loader's error; unread layers are skipped."""
    for prefix, layer in subject.layers.items():
        if isinstance(layer, QloadError) and not isinstance(layer, UnsupportedFormatError):
            found = finding_of(layer)
            hint = _evidence(subject, prefix) if found.rule == "tensor-shape" else ""
            yield Finding(
                found.rule, rule.severity, found.tensor, found.file, found.message + hint, found.remedy
            )


def _evidence(subject: Subject, prefix: str) -> str:
    """What the shapes of a GPTQ layer say about bits and groups, beside the config."""
    weights, base = subject.weights, subject.claims
    needed = [named(prefix, name) for name in ("qweight", "scales", "g_idx")]
    if (
        weights is None
        or base is None
        or base.method not in ("gptq", "auto-round")
        or not all(map(weights.has_tensor, needed))
    ):
        return ""
    words, scales, index = (weights.get_shape(name) for name in needed)
    if len(words) != 2 or len(scales) != 2 or len(index) != 1 or not index[0] or not scales[0]:
        return ""
    bits, group = words[0] * 32 / index[0], -(-index[0] // scales[0])
    claims = subject.loader.claims_of(prefix) or base.of_layers
    return (
        f"\nthe shapes say {bits:g} bits and {scales[0]} groups of {group} rows, "
        f"{base.file} claims {claims.bits} bits and a group size of {claims.group_size}"
        + (f" in {claims.source:.160}" if claims.source else "")
    )


RULE = Rule("layer", "headers", check, each=True)
