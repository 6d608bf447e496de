"""What a layer means is finite, although its scales are as large, or divisors as small, as floats can be.

A scale that is finite makes infinities of its codes where the product is beyond float32, or beyond the fp16
that an EXL2 layer is rounded to. Only layers whose scales come within 16 bits of the end of their range are
dequantized to tell: no code is larger than that.
"""

from collections.abc import Iterator

import torch

from qload.errors import QloadError
from qload.formats.unquantized import FLOATS
from qload.loader import LayerDescription
from qload.spec import Role
from qload.verify.chunks import outputs
from qload.verify.report import Finding, finding_of
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

LARGEST_CODE = 1 << 16


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each layer with an infinite weight whose own scales and codes are finite, and its first place."""
    assert subject.weights is not None
    for layer in subject.described():
        name = _extreme(subject, layer)
        if name is None:
            continue
        try:
            for start, weight in outputs(subject.weights, subject.loader, layer):
                infinite = torch.nonzero(weight.dequantize().isinf())
                if infinite.numel():
                    *experts, n, k = infinite[0].tolist()
                    place = (*experts, start + n, k)
                    yield rule.finding(
                        name,
                        subject.weights.storage.info(name).file,
                        f"{name}: scales this large, or divisors this small, make an infinity at {place}",
                    )
                    break
        except QloadError as error:
            yield finding_of(error)


def _extreme(subject: Subject, layer: LayerDescription) -> str | None:
    """The scales that come near the end of their range; None where a value is not finite anyway."""
    assert subject.weights is not None
    found = None
    for spec in layer.specs:
        name = layer.names.full(spec.name)
        numbers = subject.values.numbers.get(name)
        if spec.role is not Role.SCALE or numbers is None:
            continue
        if not numbers.finite:
            return None
        dtype = subject.weights.info(name).dtype
        range_ = torch.finfo(dtype if dtype in FLOATS else torch.float32)
        near = numbers.largest > range_.max / LARGEST_CODE
        if spec.divides:
            near = near or 0 < numbers.least < range_.tiny * LARGEST_CODE
        found = name if near else found
    return found


RULE = Rule("scale-overflow", "values", check, each=True)
