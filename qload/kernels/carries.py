"""Whether float16 carries what a weight means: found out once for a weight, not at each call.

Scales in float32 or bfloat16 reach beyond float16, and products with codes beyond scales. A weight is carried
where every number of it is finite in float16 and off by no more than half a unit of the largest number of its
row: 2**-11 times that. What is not carried is multiplied in float32. float32 and bfloat16 have one range.

A weight is known by the memory of its tensors, the part of it that they are, and how often they were written
to, so that a module that is called a thousand times asks once. Of inference tensors nobody counts that: they
are looked at on every call. Who writes through `.data` is not seen, as torch says of it. While a graph is
captured nobody can wait for the answer: what is not known by then is taken not to be carried.
"""

import logging
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qload.devices.tensors import PLAIN
from qload.kernels.slices import slices
from qload.spec import Weight

log: logging.Logger = logging.getLogger("qload")

_known: Any = WeakIdKeyDictionary()  # by the memory of a weight's first tensor
_numbers: Any = WeakIdKeyDictionary()  # of memory: an address is used again
_next = count()


def carries(weight: Weight, dtype: torch.dtype, factors: Tensor | None = None) -> bool:
    """Whether a weight, times the factors of its inputs where they are given, may be rounded to a dtype."""
    if dtype != torch.float16:
        return True
    tensors = [*weight.fields().values(), *([] if factors is None else [factors])]
    first = tensors[0]
    if type(first) not in PLAIN or first.is_meta:
        return False
    counted = not any(tensor.is_inference() for tensor in tensors)
    found = _known.setdefault(first.untyped_storage(), {}) if counted else {}
    key = (*map(_identity, tensors), type(weight), weight.config) if counted else ()
    if key not in found:
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        found[key] = _looked_at(weight, factors)
        if not found[key]:
            name = weight.layer.name or type(weight).__name__
            log.info("%s: float16 does not carry its values, it is multiplied in float32", name)
    carried: bool = found[key]
    return carried


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    memory = tensor.untyped_storage()
    if memory not in _numbers:
        _numbers[memory] = next(_next)
    part = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return _numbers[memory], tensor._version, part


def _looked_at(weight: Weight, factors: Tensor | None) -> bool:
    with torch.no_grad():
        fits = [_fits(w) for _, w in slices(weight, torch.float32, factors)]
        return bool(torch.stack(fits).all()) if fits else True


def _fits(w: Tensor) -> Tensor:
    """Whether all of some rows is carried, a tensor of one bool; NaN is not."""
    if not w.numel():
        return torch.ones((), dtype=torch.bool, device=w.device)
    half = w.half()
    least, most = w.aminmax(dim=1)
    unit = torch.maximum(least.neg(), most) * torch.finfo(torch.float16).eps / 2
    off = w.sub_(half).abs_().amax(1)
    return (off <= unit).all()
