"""Scales are finite and not negative; none that divides is zero, and not all are of a layer that has codes.

A NaN or infinite scale turns whole groups into NaN; a negative one mirrors them. AutoRound means it so: of a
symmetric integer layer about half the scales are negative, 0.41 to 0.64 of those that were measured, and less
than 1 of 16 is no such layer. Zero is lawful where it
multiplies: it is how a quantizer writes a group of zeros. A layer whose every scale is zero, or of exponents
the least, and whose words differ, was not all zeros; so it is with scales that are codes, and what scales
these.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from qload.loader import LayerDescription
from qload.spec import Role, TensorSpec, named
from qload.storage import WeightStorage
from qload.verify.chunks import is_exponents, rows, values
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

MIRRORED = {"scales": ("qweight",), "weight_scale": ("weight_packed", "weight")}  # and integers beside them
INTEGERS = (torch.int32, torch.int8)
FEW = 16  # a layer that is mirrored on purpose has more than one of so many scales negative


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """NaN, infinite, negative and wrongly zero scales, with the first place and the count of each kind."""
    assert subject.weights is not None
    storage = subject.weights.storage
    for name in subject.names:
        if subject.role(name) is Role.SCALE:
            spec = subject.specs.get(name)
            layer = subject.layers.get(subject.prefixes[name])
            yield from _check(rule, storage, name, spec, _may_be_mirrored(subject, name))
            if spec and isinstance(layer, LayerDescription) and _lost(storage, name, spec, layer):
                least = "2**-127" if is_exponents(spec) else "zero"
                yield rule.finding(
                    name, storage.info(name).file, f"{name}: all scales are {least}, and the codes differ"
                )


def _check(
    rule: Rule, storage: WeightStorage, name: str, spec: TensorSpec | None, mirrored: bool
) -> Iterator[Finding]:
    counts: dict[str, int] = {}
    places: dict[str, tuple[tuple[int, ...], float]] = {}
    for start, run in values(storage, name, spec):
        for kind, mask in _wrong(run, spec).items():
            found = int(mask.sum())
            counts[kind] = counts.get(kind, 0) + found
            if found and kind not in places:
                first, *rest = torch.nonzero(mask)[0].tolist()
                places[kind] = ((start + first, *rest), float(run[(first, *rest)]))
    size = prod(storage.info(name).shape)
    many = mirrored and counts.get("negative", 0) * FEW >= size >= FEW
    for kind, (place, value) in places.items():
        if kind == "negative" and many:
            continue
        yield rule.finding(
            name,
            storage.info(name).file,
            f"{name}: {kind} scale {value:g} at {place}; {counts[kind]} in all",
        )


def _may_be_mirrored(subject: Subject, name: str) -> bool:
    """Whether a tensor scales integers, by the declarations of those beside it."""
    scale, prefix = subject.specs.get(name), subject.prefixes[name]
    beside = [
        subject.specs.get(named(prefix, codes)) for codes in MIRRORED.get(scale.name if scale else "", ())
    ]
    return any(codes.dtypes[0] in INTEGERS for codes in beside if codes)


def _wrong(run: Tensor, spec: TensorSpec | None) -> dict[str, Tensor]:
    found = {"NaN": run.isnan(), "infinite": run.isinf(), "negative": (run < 0) & ~run.isinf()}
    return {**found, "zero": run == 0} if spec and spec.divides else found


def _lost(storage: WeightStorage, name: str, spec: TensorSpec, layer: LayerDescription) -> bool:
    """Whether no scale says anything while the codes do."""
    if spec.divides or not (storage.info(name).dtype.is_floating_point or is_exponents(spec)):
        return False
    told = rows(storage, name) if is_exponents(spec) else values(storage, name, spec)
    if any(bool(run.any()) for _, run in told):
        return False
    words = (run.contiguous().view(torch.uint8) for _, run in rows(storage, _codes(spec, layer)))
    first = None
    for run in words:
        first = run.flatten()[0] if first is None else first
        if bool((run != first).any()):
            return True
    return False


def _codes(spec: TensorSpec, layer: LayerDescription) -> str:
    """The name of what a scale multiplies: the layer's codes, or where it is spent, scales in codes."""
    role = Role.SCALE if spec.spent else Role.WORD
    return next(layer.names.full(other.name) for other in layer.specs if other.role is role)


RULE = Rule("scale-value", "values", check, each=True)
