"""What rounding may cost a kernel, by how it adds: in which type, in how many parts, by which scales."""

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels.bounds import Bounded, of_linear
from qload.spec import Weight


def derived_bound(
    x: Tensor,
    weight: Weight,
    *,
    accumulate: torch.dtype = torch.float32,
    split_k: int = 1,
    partials: torch.dtype = torch.float32,
    scales: torch.dtype | None = None,
) -> Bounded:
    """What x (M, K) times a `weight` (N, K) is exactly, and how far a kernel may be off before it rounds y.

    K sums in float32 in any order, and the weight rounded to the type of x, are allowed always. ArgumentError
    where so many sums in so narrow a type may be off by all there is: then no bound says anything.

    Parameters
    ----------
    x, weight
        What is multiplied.
    accumulate
        The type that products are added in.
    split_k, partials
        Into how many parts the kernel divides K, and the type that it keeps their sums in.
    scales
        The type that the kernel rounds scales to; None: it takes them as they are stored.
    """
    if split_k < 1:
        raise ArgumentError("split_k", "at least 1", str(split_k))
    base, K = of_linear(x, weight, activations="unquantized"), x.shape[1]
    matrix = weight.dequantize().double()
    factors = weight.input_factors
    inputs = x.double().abs() if factors is None else (x.double() * factors.double()).abs()
    size = inputs @ matrix.abs().T
    share, error = 0.0, base.error
    for count, dtype in ((K, accumulate), (2 * split_k - 1, partials)):
        if dtype != torch.float32:
            own = torch.finfo(dtype)
            share += _share(count, own.eps / 2, dtype)
            error = error + count * own.smallest_normal * own.eps
    if scales is not None:
        half = torch.finfo(scales).eps / 2
        share += half * (1 + half)
    return Bounded(base.value, error + share * (size + base.error))


def _share(count: int, half: float, dtype: torch.dtype) -> float:
    if count * half >= 1:
        raise ArgumentError("accumulate", f"a type that {count} sums leave something of", str(dtype))
    return count * half / (1 - count * half)
