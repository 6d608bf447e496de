"""Of the method that the config claims, some layer is there, and of the bits that it claims.

A checkpoint that says `marlin` and holds plain tensors only has lost what it was made for: nothing that is
left contradicts anything. Bits that no layer has are those of another config: the layers are read by their
shapes, and engines fail. One file of several is not asked: the layers may be in another.
"""

from collections.abc import Iterator
from pathlib import Path

from qload.errors import QloadError
from qload.loader import LayerDescription
from qload.spec import Config, LayerClaims, Role
from qload.storage.checkpoint_files import INDEX
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Report a method without a layer if all layers are plain and read, and bits that no layer has."""
    claims = subject.claims
    if claims is None or not claims.formats or _one_of_several(Path(subject.place)):
        return
    formats = {fmt.weight_type.format for fmt in claims.formats}
    if all(_is_plain(layer) for layer in subject.layers.values()) and not subject.unread:
        yield rule.finding(
            None,
            claims.file,
            f"{claims.file}: quant_method is {claims.method}, and no layer is stored as "
            f"{' or '.join(sorted(formats))}: {len(subject.layers)} layers are plain",
        )
    yield from _denied_bits(rule, subject, claims.file)


def _denied_bits(rule: Rule, subject: Subject, file: str) -> Iterator[Finding]:
    """Report each claim of bits, of the base config or an entry, that all of its layers contradict."""
    of_claims: dict[LayerClaims, list[Config]] = {}
    for layer in subject.described():
        if layer.format.claims is not None and not layer.format.weight_type.plain:
            of_claims.setdefault(layer.format.claims, []).append(layer.format.config)
    for claims, configs in of_claims.items():
        denied = [config for config in configs if getattr(config, "claimed_bits", None) is not None]
        if denied and len(denied) == len(configs):
            found = " or ".join(sorted({str(getattr(config, "bits", None)) for config in denied}))
            whose = f"its {len(configs)} layers" if claims.source else "all layers"
            yield rule.finding(
                None,
                file,
                f"{file}: {claims.says('bits')}, but by shape {whose} have {found}",
                f"set bits to {found} in {claims.place(file)}",
            )


def _is_plain(layer: LayerDescription | QloadError) -> bool:
    """Return whether a layer is plain, without a scale of the method beside it."""
    if isinstance(layer, QloadError) or not layer.format.weight_type.plain:
        return False
    return not any(spec.role is Role.UNUSED for spec in layer.specs)


def _one_of_several(path: Path) -> bool:
    return path.is_file() and not path.name.endswith(INDEX) and any(path.parent.glob(f"*{INDEX}"))


RULE = Rule("claimed-method", "headers", check)
