"""What a layer means is finite, although its scales are as large, or divisors as small, as floats can be.

A scale that is finite makes infinities of its codes where the product is beyond float32, or beyond the fp16
that an EXL2 layer is rounded to. Only layers whose scales come within 16 bits of the end of their range are
dequantized to tell: no code is larger than that.
"""

from collections.abc import Iterator

import torch

from qload.errors import QloadError
from qload.loader import LayerDescription
from qload.spec import Role
from qload.storage import WeightStorage
from qload.verify.chunks import outputs, values
from qload.verify.report import Finding, finding_of
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

LARGEST_CODE = 1 << 16


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each layer with an infinite weight whose own scales and codes are finite, and its first place."""
    assert subject.weights is not None
    for layer in subject.described():
        name = _extreme(subject.weights.storage, layer)
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


def _extreme(storage: WeightStorage, layer: LayerDescription) -> str | None:
    """The scales that come near the end of their range; None where a value is not finite anyway."""
    found = None
    for spec in layer.specs:
        name = layer.names.full(spec.name)
        if spec.role is not Role.SCALE:
            continue
        for _, run in values(storage, name, spec):
            size, range_ = run.abs(), torch.finfo(run.dtype)
            if not bool(size.isfinite().all()):
                return None
            near = size > range_.max / LARGEST_CODE
            if spec.divides:
                near |= (size > 0) & (size < range_.tiny * LARGEST_CODE)
            found = name if bool(near.any()) else found
    return found


RULE = Rule("scale-overflow", "values", check, each=True)
