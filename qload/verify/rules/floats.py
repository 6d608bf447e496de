"""Plain tensors, codes that are floats, and tables of values hold no NaN and no infinity.

Minus infinity in a mask of attention is what hides a place.
"""

from collections.abc import Iterator
from math import inf

import torch

from qload.spec import Role
from qload.verify.chunks import values
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.weights.exemptions import is_mask


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor with a value that is not finite, its first place and the count."""
    assert subject.weights is not None
    storage = subject.weights.storage
    for name in subject.judged:
        numbers = subject.values.numbers.get(name)
        if numbers is None or numbers.finite or subject.role(name) is Role.SCALE:
            continue
        if is_mask(name, storage.info(name)) and numbers.low == -inf and numbers.high < inf:
            continue
        count, place, value = 0, (), 0.0
        for start, run in values(storage, name, subject.specs.get(name)):
            wrong = ~torch.isfinite(run)
            found = int(wrong.sum())
            if found and not count:
                first, *rest = torch.nonzero(wrong)[0].tolist()
                place, value = (start + first, *rest), float(run[(first, *rest)])
            count += found
        message = f"{name}: {value:g} at {place}; {count} in all"
        yield rule.finding(name, storage.info(name).file, message)


RULE = Rule("float-value", "values", check, each=True)
