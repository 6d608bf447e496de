"""Plain floating point tensors hold no NaN and no infinity."""

from collections.abc import Iterator

import torch

from qload.formats import ROLES
from qload.formats.unquantized import FLOATS
from qload.spec import Role
from qload.verify.chunks import rows
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each plain tensor with a value that is not finite, its first place and the count."""
    assert subject.weights is not None
    storage = subject.weights.storage
    for name in subject.names:
        info, (prefix, _, suffix) = storage.info(name), name.rpartition(".")
        of_a_layer = ROLES.get(suffix, Role.FLOAT) is not Role.FLOAT and subject.is_quantized(prefix)
        if info.dtype not in FLOATS or of_a_layer:
            continue
        count, place, value = 0, (), 0.0
        for start, run in rows(storage, name):
            wrong = ~torch.isfinite(run)
            found = int(wrong.sum())
            if found and not count:
                first, *rest = torch.nonzero(wrong)[0].tolist()
                place, value = (start + first, *rest), float(run[(first, *rest)])
            count += found
        if count:
            yield rule.finding(name, info.file, f"{name}: {value:g} at {place}; {count} in all")


RULE = Rule("float-value", "values", check)
