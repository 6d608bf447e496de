"""Floats of 16 bits are of the type that the header says.

An exponent of bf16 has three bits more than one of fp16. Bits of fp16 that are read as bf16 are of all
sizes, as small as 1e-16; those of bf16 that are read as fp16 are all about 1.
"""

from collections.abc import Iterator

import torch

from qload.spec import Role
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.verify.values import Numbers

OTHERS = {torch.float16: "bf16", torch.bfloat16: "fp16"}
COUNT = 64  # values that have quantiles
TINY = 1e-9  # the median of magnitudes; sound tensors have 1e-5 and more
USUAL = (8.0, 200.0)  # the quantile 0.95 of magnitudes over that of 0.05; of a normal distribution it is 31
AROUND_ONE = (0.5, 2.5)  # the median of what bits of bf16 are as fp16
NARROW, WIDE = 3.0, 1e6  # the same of the other type's bits, where theirs is usual


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor whose values are what the other type's bits look like."""
    assert subject.weights is not None
    for name in subject.judged:
        numbers, info = subject.values.numbers.get(name), subject.weights.info(name)
        if numbers is None or numbers.count < COUNT or not numbers.median or info.dtype not in OTHERS:
            continue
        if subject.values.contents[name].word is not None:
            continue  # the same value all through, as the least scale of a layer of zeros
        if _is_other(numbers, info.dtype, subject.role(name), len(info.shape)):
            said = str(info.dtype).removeprefix("torch.")
            low, _, high = numbers.quantiles
            yield rule.finding(
                name,
                info.file,
                f"{name}: magnitudes of {said}, as the header says, are {low:g} to {high:g} (but for the "
                f"least and the largest 5 %); as the bits of {OTHERS[info.dtype]} they are as usual",
            )


def _is_other(numbers: Numbers, dtype: torch.dtype, role: Role, axes: int) -> bool:
    """Whether values are strange as what they are said to be, and as the other type are not."""
    tiny = dtype is torch.bfloat16 and numbers.median < TINY
    if role is not Role.FLOAT:
        return tiny and role is Role.SCALE  # but for that, scales may be as they like
    least, most = USUAL
    if axes < 2 or not least < _width(numbers.retyped) < most:
        return False  # a vector, as a bias of keys that nothing trains, may be as small as it likes
    if tiny:
        return True
    width, (low, high) = _width(numbers.quantiles), AROUND_ONE
    if dtype is torch.bfloat16:
        return width > WIDE
    return 1 < width < NARROW and low < numbers.median < high


def _width(quantiles: tuple[float, float, float]) -> float:
    low, _, high = quantiles
    return high / low if low else 0.0


RULE = Rule("float-type", "values", check, each=True)
