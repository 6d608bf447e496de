"""Codes and packed fields hold only the values that their declaration allows.

A sparse tensor core reads any four bits as two places. Where both are one place, or in the wrong order,
it multiplies a kept code with another row's input. A code of four bits that is stored in a byte and needs
five was never written by a quantizer, and kernels that pack it drop a bit. A table that kernels know by
heart, and a file has in another way, has two readings.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qload.spec import TensorSpec
from qload.storage import WeightStorage
from qload.verify.chunks import rows
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

Split = Callable[[Tensor], tuple[Tensor, Tensor]]  # a run -> the values in it, and which are wrong


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor with another value: the first, its place, and how many."""
    assert subject.weights is not None
    storage = subject.weights.storage
    for layer in subject.described():
        for spec in layer.specs:
            name = layer.names.full(spec.name)
            for what, allowed, split in _declared(spec):
                said = _wrong(storage, name, split)
                if said:
                    value, place, count = said
                    yield rule.finding(
                        name,
                        layer.names.file(spec.name),
                        f"{name}: {what} {value:g} at {place}, it has to be {allowed}; {count} in all",
                    )


def _declared(spec: TensorSpec) -> Iterator[tuple[str, str, Split]]:
    """(what each value is, what it has to be, where they are) of each thing that a declaration says."""
    if spec.nibbles:
        allowed = torch.tensor(spec.nibbles)
        yield "field", f"one of {', '.join(map(str, spec.nibbles))}", lambda run: _fields(run, allowed)
    if spec.between:
        least, most = spec.between
        yield "code", f"{least} to {most}", lambda run: (run, (run < least) | (run > most))
    if spec.holds:
        table = torch.tensor(spec.holds)
        yield "value", "as in the table that kernels know", lambda run: (run, run != table)


def _fields(run: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    fields = torch.stack([(run.to(torch.int32) >> shift) & 15 for shift in (0, 4, 8, 12)], -1)
    return fields, ~torch.isin(fields, allowed)


def _wrong(storage: WeightStorage, name: str, split: Split) -> tuple[float, tuple[int, ...], int] | None:
    """(value, place) of the first wrong one, and how many there are."""
    count, first = 0, None
    for start, run in rows(storage, name):
        found, wrong = split(run)
        places = torch.nonzero(wrong)
        if places.numel() and first is None:
            row, *rest = places[0].tolist()
            first = (float(found[(row, *rest)]), (start + row, *rest))
        count += places.shape[0]
    return (*first, count) if first else None


RULE = Rule("field-value", "values", check, each=True)
