"""Scales are finite and not negative; none that divides is zero, and not all are of a layer that has codes.

A NaN or infinite scale turns whole groups into NaN; a negative one mirrors them. Zero is lawful where it
multiplies: it is how a quantizer writes a group of zeros. A layer whose every scale is zero, and whose words
differ, was not all zeros.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qload.loader import Studied
from qload.spec import Role, TensorSpec
from qload.storage import WeightStorage
from qload.verify.chunks import rows, values
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """NaN, infinite, negative and wrongly zero scales, with the first place and the count of each kind."""
    assert subject.weights is not None
    storage = subject.weights.storage
    for name in subject.names:
        if subject.role(name) is Role.SCALE:
            spec = subject.specs.get(name)
            yield from _check(rule, storage, name, spec)
            layer = subject.layers.get(subject.prefixes[name])
            if spec and isinstance(layer, Studied) and _lost(storage, name, spec, layer):
                yield rule.finding(
                    name, storage.info(name).file, f"{name}: all scales are zero, and the codes differ"
                )


def _check(rule: Rule, storage: WeightStorage, name: str, spec: TensorSpec | None) -> Iterator[Finding]:
    counts: dict[str, int] = {}
    places: dict[str, tuple[tuple[int, ...], float]] = {}
    for start, run in values(storage, name, spec):
        for kind, mask in _wrong(run, spec).items():
            found = int(mask.sum())
            counts[kind] = counts.get(kind, 0) + found
            if found and kind not in places:
                first, *rest = torch.nonzero(mask)[0].tolist()
                places[kind] = ((start + first, *rest), float(run[(first, *rest)]))
    for kind, (place, value) in places.items():
        yield rule.finding(
            name,
            storage.info(name).file,
            f"{name}: {kind} scale {value:g} at {place}; {counts[kind]} in all",
        )


def _wrong(run: Tensor, spec: TensorSpec | None) -> dict[str, Tensor]:
    found = {"NaN": run.isnan(), "infinite": run.isinf(), "negative": (run < 0) & ~run.isinf()}
    return {**found, "zero": run == 0} if spec and spec.divides else found


def _lost(storage: WeightStorage, name: str, spec: TensorSpec, layer: Studied) -> bool:
    """Whether no scale says anything while the codes do."""
    floats = storage.info(name).dtype.is_floating_point and not (spec.spent or spec.divides)
    if not floats or any(bool(run.any()) for _, run in values(storage, name, spec)):
        return False
    codes = next(spec for spec in layer.specs if spec.role is Role.WORD)
    words = (run.contiguous().view(torch.uint8) for _, run in rows(storage, layer.names.full(codes.name)))
    first = None
    for run in words:
        first = run.flatten()[0] if first is None else first
        if bool((run != first).any()):
            return True
    return False


RULE = Rule("scale-value", "values", check)
