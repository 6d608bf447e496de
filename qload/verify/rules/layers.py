"""A layer's tensors are complete, of the declared shapes and dtypes, and their indices in range.

These are the checks that loading makes; here all layers are asked, and every error is kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qload.errors import QloadError, UnsupportedFormatError
from qload.spec import LayerClaims, named
from qload.verify.contradictions import claims_of
from qload.verify.report import Contradiction, Finding, LayerContradiction, finding_of
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

# The ids under which an error of the loader is reported.
IDS = ("missing-tensor", "tensor-shape", "tensor-dtype", "index-range", "index-ambiguous", "two-formats")


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Report every layer that cannot be loaded, with the loader's error; unread layers are skipped."""
    for prefix, layer in subject.layers.items():
        if isinstance(layer, QloadError) and not isinstance(layer, UnsupportedFormatError):
            found = finding_of(layer)
            stored = _stored_groups(subject, prefix) if found.rule == "tensor-shape" else None
            claims = claims_of(subject, prefix)
            if stored is None or claims is None or subject.claims is None:
                yield replace(found, severity=rule.severity)
                continue
            contradiction = _contradiction(stored, claims, subject.claims.file)
            yield LayerContradiction(
                found.rule,
                rule.severity,
                found.tensor,
                found.file,
                found.message + _evidence(stored, claims, subject.claims.file),
                found.remedy,
                contradiction=contradiction,
            )


@dataclass(frozen=True)
class _StoredGroups:
    """Bits, inputs, and number of groups, as the shapes of a layer show."""

    bits: float
    K: int
    groups: int

    @property
    def size(self) -> int:
        """Rows of a group."""
        return -(-self.K // self.groups)

    def has_size(self, size: int | None) -> bool:
        """Whether a group size, -1 for all rows, makes as many groups; None is no claim."""
        return size is None or self.groups == (1 if size == -1 else -(-self.K // max(1, size)))


def _stored_groups(subject: Subject, prefix: str) -> _StoredGroups | None:
    """Return what the shapes of a GPTQ or AWQ layer show; None if they are not shapes of such a layer."""
    weights = subject.weights
    base = subject.claims
    if weights is None or base is None or base.method not in ("gptq", "auto-round", "awq"):
        return None
    needed = [named(prefix, name) for name in ("qweight", "scales")]
    if not all(map(weights.has_tensor, needed)):
        return None
    words, scales = (weights.get_shape(name) for name in needed)
    if len(words) != 2 or len(scales) != 2 or 0 in (*words, *scales):
        return None
    if weights.has_tensor(named(prefix, "g_idx")):
        index = weights.get_shape(named(prefix, "g_idx"))
        rows, bits = (index[0], words[0] * 32 / index[0]) if len(index) == 1 and index[0] else (0, 0.0)
    else:  # words along the outputs
        rows, bits = (words[0], words[1] * 32 / scales[1]) if base.method == "awq" else (0, 0.0)
    return _StoredGroups(bits, rows, scales[0]) if rows else None


def _evidence(stored: _StoredGroups, claims: LayerClaims, file: str) -> str:
    """What the shapes of a layer show about bits and groups, beside the config."""
    return (
        f"\nthe shapes say {stored.bits:g} bits and {stored.groups} groups of {stored.size} rows, "
        f"{file} claims {claims.bits} bits and a group size of {claims.group_size}"
        + (f" in {claims.source:.160}" if claims.source else "")
    )


def _contradiction(stored: _StoredGroups, claims: LayerClaims, file: str) -> Contradiction | None:
    """Return the setting of groups or bits that shapes contradict; None if that is both or none of them."""
    groups = not stored.has_size(claims.group_size)
    bits = claims.bits not in (None, stored.bits)
    if groups == bits:
        return None
    key, value = ("group_size", stored.size) if groups else ("bits", int(stored.bits))
    what = f"groups of {value} rows" if groups else f"{value} bits"
    return Contradiction(
        claims,
        claims.says(key),
        f"have {what} by their shapes",
        f"set {key} to {value} in {claims.place(file)}",
    )


RULE = Rule("layer", "headers", check, each=True)
