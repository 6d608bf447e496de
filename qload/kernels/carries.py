"""Whether float16 carries what a weight means: found out once for a weight, not at each call.

Scales in float32 or bfloat16 reach beyond float16, and products with codes beyond scales. A weight is carried
where every number of it is finite in float16 and off by no more than half a unit of the largest number of its
row: 2**-11 times that. What is not carried is multiplied in float32. float32 and bfloat16 have one range.

A weight is known by the memory of its tensors and how often they were written to, for as long as that memory
is there, so that a module that is called a thousand times asks once. While a graph is captured nobody can
wait for the answer: what is not known by then is taken not to be carried.
"""

import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qload.devices.tensors import PLAIN
from qload.kernels.slices import slices
from qload.spec import Weight

log: logging.Logger = logging.getLogger("qload")

_known: Any = WeakIdKeyDictionary()


def carries(weight: Weight, dtype: torch.dtype, factors: Tensor | None = None) -> bool:
    """Whether a weight, times the factors of its inputs where they are given, may be rounded to a dtype."""
    if dtype != torch.float16:
        return True
    first = next(iter(weight.fields().values()))
    if type(first) not in PLAIN or first.is_meta:
        return False
    found = _known.setdefault(first.untyped_storage(), {})  # which views and stacks share
    key = (*map(_identity, weight.fields().values()), factors is not None, weight.config)
    if key not in found:
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        found[key] = _looked_at(weight, factors)
        if not found[key]:
            name = weight.layer.name or type(weight).__name__
            log.info("%s: float16 does not carry its values, it is multiplied in float32", name)
    carried: bool = found[key]
    return carried


def _identity(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


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
