"""Packed fields hold only the values that their declaration allows: 2:4 metadata keeps two of four rows.

A sparse tensor core reads any four bits as two places. Where both are one place, or in the wrong order,
it multiplies a kept code with another row's input.
"""

from collections.abc import Iterator

import torch

from qload.verify.chunks import rows
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor with a field of another value: the first, its place, and how many."""
    assert subject.weights is not None
    storage = subject.weights.storage
    for layer in subject.studied():
        for spec in layer.specs:
            if not spec.nibbles:
                continue
            name, count, first = layer.names.full(spec.name), 0, None
            for start, run in rows(storage, name):
                fields = torch.stack([(run.to(torch.int32) >> shift) & 15 for shift in (0, 4, 8, 12)], -1)
                wrong = torch.nonzero(~torch.isin(fields, torch.tensor(spec.nibbles)))
                if wrong.numel() and first is None:
                    row, *rest = wrong[0].tolist()
                    first = ((start + row, *rest), int(fields[(row, *rest)]))
                count += wrong.shape[0]
            if first is not None:
                allowed = ", ".join(map(str, spec.nibbles))
                yield rule.finding(
                    name,
                    layer.names.file(spec.name),
                    f"{name}: field {first[1]} at {first[0]}, it has to be one of {allowed}; {count} in all",
                )


RULE = Rule("field-value", "values", check)
