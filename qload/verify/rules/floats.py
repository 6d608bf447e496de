"""Plain tensors, codes that are floats, and tables of values hold no NaN and no infinity."""

from collections.abc import Iterator

import torch

from qload.formats.unquantized import FLOATS
from qload.spec import Role, TensorSpec
from qload.storage import TensorInfo
from qload.verify.chunks import values
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor with a value that is not finite, its first place and the count."""
    assert subject.weights is not None
    storage = subject.weights.storage
    for name in subject.names:
        info, spec = storage.info(name), subject.specs.get(name)
        if not _holds_values(info, spec, subject.role(name)):
            continue
        count, place, value = 0, (), 0.0
        for start, run in values(storage, name, spec):
            wrong = ~torch.isfinite(run)
            found = int(wrong.sum())
            if found and not count:
                first, *rest = torch.nonzero(wrong)[0].tolist()
                place, value = (start + first, *rest), float(run[(first, *rest)])
            count += found
        if count:
            yield rule.finding(name, info.file, f"{name}: {value:g} at {place}; {count} in all")


def _holds_values(info: TensorInfo, spec: TensorSpec | None, role: Role) -> bool:
    """Codes that may be stored as whole numbers too are bits, whatever the dtype says."""
    if role is Role.WORD:
        return spec is not None and all(dtype.is_floating_point for dtype in spec.dtypes)
    return role is Role.FLOAT and info.dtype in FLOATS


RULE = Rule("float-value", "values", check, each=True)
