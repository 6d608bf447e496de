"""x times a weight in panels, by the CPU module: codes become floats in registers, or in the cache.

Few tokens read each byte of the weight once and write it nowhere. Of more tokens some rows of some panels are
spelled out and multiplied from the cache. `csrc/cpu/product.h` says what is computed, and in which order; the
result has the same bits on any number of threads.
"""

from types import ModuleType

import torch
from torch import Tensor

from qload.devices.tensors import FLOATS, address, is_plain
from qload.kernel_formats.panels import PanelsWeight
from qload.native import is_on, isa, load, threads
from qload.spec import Weight

# Up to so many tokens codes become floats in registers, by instruction set: docs/cpu.md has the times.
FEW = {"scalar": 4, "avx2": 4, "avx512": 4}


def why_not(weight: Weight, dtype: torch.dtype) -> str | None:
    """Why the CPU module does not multiply activations of a `dtype` with a `weight`, or None."""
    module = load("cpu")
    if module.found is None:
        return f"the CPU module is {module.reason}"
    if not isinstance(weight, PanelsWeight):
        return f"no CPU kernel reads {type(weight).__name__}"
    if dtype not in FLOATS:
        return f"needs activations of float32, float16 or bfloat16, got {str(dtype).removeprefix('torch.')}"
    return None if 0 not in weight.shape else f"a weight of shape {weight.shape} has no elements"


def can_multiply(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """Whether `linear` multiplies this: a weight and x whose memory is here, and no gradient asked for."""
    if not isinstance(weight, PanelsWeight) or why_not(weight, x.dtype) is not None or not is_on():
        return False
    held = (*weight.fields().values(), *(() if bias is None else (bias,)))
    if not all(is_plain(tensor, "cpu") for tensor in (x, *held)):
        return False
    return all(tensor.is_contiguous() for tensor in weight.fields().values())


def linear(x: Tensor, weight: PanelsWeight, bias: Tensor | None = None, few: int | None = None) -> Tensor:
    """(..., K) -> (..., N) in x's dtype, sums in float32; asks nobody whether the weight fits.

    `few`: up to so many tokens codes become floats in registers; None: as `FEW` says.
    """
    N, K = weight.shape
    rows, name = x.detach().reshape(-1, K), isa()
    rows = rows if rows.stride(-1) == 1 or K == 1 else rows.contiguous()
    y = torch.empty(rows.shape[0], N, dtype=x.dtype)
    added = None if bias is None else bias.detach().to(torch.float32).contiguous()
    config = weight.config
    group, run = config.rows_of_a_group(K), config.run(K)
    _module().multiply(
        name,
        config.bits,
        (rows.shape[0], K, N, weight.rows, group, run, rows.stride(0)),
        _typed(rows),
        address(weight.perm),
        weight.qweight.data_ptr(),
        _typed(weight.scales),
        address(weight.zeros),
        address(added),
        _typed(y),
        FEW[name] if few is None else few,
        threads(),
    )
    return y.view(*x.shape[:-1], N)


def _typed(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), FLOATS.index(tensor.dtype)


def _module() -> ModuleType:
    found = load("cpu").found
    assert found is not None  # `why_not` has asked
    return found
