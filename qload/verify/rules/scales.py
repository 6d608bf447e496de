"""Scales are finite and have the sign that their format allows; none that divides is zero, and not all are.

A NaN or infinite scale turns whole groups into NaN; a negative one mirrors them. Of a symmetric layer of
integers it says which of the two ends a quantizer has used, and about half of the scales are negative then;
a few among many are damage. Zero is lawful where it multiplies: it is how a quantizer writes a group of
zeros. A layer whose every scale is zero, or of exponents the least, and whose words differ, was not all
zeros; so it is with scales that are codes, and what scales these.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from qload.formats import AWQConfig, CTPackConfig, GPTQConfig
from qload.loader import LayerDescription
from qload.spec import Role, TensorSpec
from qload.storage import WeightStorage
from qload.verify.chunks import values
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.verify.values import Numbers

SIGNED = (GPTQConfig, AWQConfig, CTPackConfig)
FEW = 16  # fewer than one of so many scales is negative where their signs do not say which end is used


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """NaN, infinite, negative and wrongly zero scales, with the first place and the count of each kind."""
    assert subject.weights is not None
    storage = subject.weights.storage
    for name in subject.judged:
        numbers = subject.values.numbers.get(name)
        if subject.role(name) is not Role.SCALE:
            continue
        spec, layer = subject.specs.get(name), subject.layer_of(name)
        if numbers is not None and _suspect(numbers, spec):
            yield from _check(rule, storage, name, spec, signed=_signed(layer))
        if spec and layer is not None and _lost(subject, name, spec, layer):
            least = "2**-127" if spec.is_exponents else "zero"
            yield rule.finding(
                name, storage.info(name).file, f"{name}: all scales are {least}, and the codes differ"
            )


def _suspect(numbers: Numbers, spec: TensorSpec | None) -> bool:
    """Whether the range alone, or a zero that divides, calls for a second look."""
    return not numbers.finite or numbers.low < 0 or bool(spec and spec.divides and numbers.zeros)


def _signed(layer: LayerDescription | None) -> bool:
    """Whether the signs of a layer's scales may say something: of integer codes with a zero point."""
    return layer is not None and isinstance(layer.format.config, SIGNED)


def _check(
    rule: Rule, storage: WeightStorage, name: str, spec: TensorSpec | None, *, signed: bool
) -> Iterator[Finding]:
    counts: dict[str, int] = {}
    places: dict[str, tuple[tuple[int, ...], float]] = {}
    total = prod(storage.info(name).shape)
    for start, run in values(storage, name, spec):
        for kind, mask in _wrong(run, spec).items():
            found = int(mask.sum())
            counts[kind] = counts.get(kind, 0) + found
            if found and kind not in places:
                first, *rest = torch.nonzero(mask)[0].tolist()
                places[kind] = ((start + first, *rest), float(run[(first, *rest)]))
    for kind, (place, value) in places.items():
        if kind == "negative" and signed and counts[kind] * FEW >= total >= FEW:
            continue
        yield rule.finding(
            name,
            storage.info(name).file,
            f"{name}: {kind} scale {value:g} at {place}; {counts[kind]} in all",
        )


def _wrong(run: Tensor, spec: TensorSpec | None) -> dict[str, Tensor]:
    found = {"NaN": run.isnan(), "infinite": run.isinf(), "negative": (run < 0) & ~run.isinf()}
    return {**found, "zero": run == 0} if spec and spec.divides else found


def _lost(subject: Subject, name: str, spec: TensorSpec, layer: LayerDescription) -> bool:
    """Whether no scale says anything while the codes do."""
    numbers, contents = subject.values.numbers.get(name), subject.values.contents
    if spec.divides or numbers is None or not contents[name].nbytes:
        return False
    nothing = contents[name].byte == 0 if spec.is_exponents else not numbers.low and not numbers.high
    return nothing and contents[_codes(spec, layer)].byte is None


def _codes(spec: TensorSpec, layer: LayerDescription) -> str:
    """The name of what a scale multiplies: the layer's codes, or where it is spent, scales in codes."""
    role = Role.SCALE if spec.spent else Role.WORD
    return next(layer.names.full(other.name) for other in layer.specs if other.role is role)


RULE = Rule("scale-value", "values", check, each=True)
