"""Floats of 16 bits are of the type that the header says.

Bits of fp16 that are read as bf16 are about 1e-16, and those of bf16 that are read as fp16 all about 1: the
exponent has three bits more in the one than in the other.
"""

from collections.abc import Iterator

import torch

from qload.spec import Role
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.verify.values import Numbers

COUNT = 64  # values that have quantiles
TINY = 1e-9  # the median of magnitudes; sound tensors have 1e-5 and more
NARROW = 0.5  # quantile 0.05 over the median: of a normal distribution 0.09
AROUND_ONE = (0.5, 2.0)


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor whose values are what the other type's bits look like."""
    assert subject.weights is not None
    for name in subject.names:
        numbers, info = subject.values.numbers.get(name), subject.weights.info(name)
        if numbers is None or numbers.count < COUNT or not numbers.median:
            continue
        if info.dtype is torch.bfloat16 and numbers.median < TINY:
            other = "fp16"
        elif info.dtype is torch.float16 and _is_bfloat16(numbers, subject.role(name), len(info.shape)):
            other = "bf16"
        else:
            continue
        said = str(info.dtype).removeprefix("torch.")
        yield rule.finding(
            name,
            info.file,
            f"{name}: half of the magnitudes are below {numbers.median:g}: as {said}, the header says; "
            f"they look like the bits of {other}",
        )


def _is_bfloat16(numbers: Numbers, role: Role, axes: int) -> bool:
    """Of a matrix of both signs: none of its values is near zero."""
    low, middle, high = numbers.quantiles
    low_end, high_end = AROUND_ONE
    signs = numbers.low < 0 < numbers.high
    narrow = NARROW * middle < low < high and low_end < middle < high < high_end
    return role is Role.FLOAT and axes > 1 and signs and narrow


RULE = Rule("float-type", "values", check, each=True)
