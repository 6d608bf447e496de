"""Checks that can fail: bits where bits are promised, and three oracles for anything that multiplies.

A kernel is any callable from x (M, K) to y (M, N). `read_back` shows it one input at a time and gets the
weights that it thinks it has; `exact_sums` uses numbers that every order of addition sums exactly;
`derived_bound` allows what rounding can cost and not more. None takes a tolerance, none passes on NaN.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qload.kernels.bounds import excess, of_linear
from qload.spec import Weight

Kernel = Callable[[Tensor], Tensor]


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """`got` and `want` have equal dtype, shape and bytes: -0.0 is not 0.0, and a NaN is itself."""
    __tracebackhide__ = True
    assert (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape))
    size = want.element_size()
    a, b = (t.contiguous().reshape(-1).view(torch.uint8).reshape(-1, size) for t in (got, want))
    apart = (a != b).any(1).nonzero().flatten()
    if apart.numel():
        place = torch.unravel_index(apart[0], want.shape) if want.ndim else ()
        at = tuple(int(i) for i in place)
        raise AssertionError(
            f"{apart.numel()} of {want.numel()} differ, first at {at}: got {got[at]}, expected {want[at]}"
        )


def assert_reads_back(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> None:
    """One-hot inputs of `dtype` return the columns of `weight`, rounded once.

    `kernel`: any callable x (M, K) -> y (M, N), which is taken to multiply by that weight.
    """
    __tracebackhide__ = True
    N, K = weight.shape
    want = _applied(weight).to(dtype).T
    for start in range(0, K, 256):
        x = torch.eye(K, dtype=dtype, device=want.device)[start : start + 256]
        got = kernel(x)
        assert tuple(got.shape) == (x.shape[0], N)
        wrong = (got != want[start : start + 256]).nonzero()
        if wrong.numel():
            k, n = wrong[0].tolist()
            raise AssertionError(
                f"the kernel has {got[k, n]:g} at (n, k) = ({n}, {start + k}), "
                f"the weight {want[start + k, n]:g}; "
                f"{wrong.shape[0]} wrong among inputs {start} to {start + x.shape[0]}"
            )


def assert_sums_exactly(kernel: Kernel, weight: Weight, dtype: torch.dtype, *, M: int = 3) -> None:
    """Small integers times a weight of small integers and power-of-two scales: bit equality.

    `kernel`: any callable x (`M`, K) -> y (M, N) in `dtype`, which is taken to multiply by `weight`, rounded
    once to that. Raises ValueError for a weight whose sums float32 cannot hold exactly: then nothing would be
    shown.
    """
    __tracebackhide__ = True
    w = _applied(weight).to(dtype).double()
    x = (torch.arange(M * w.shape[1], device=w.device) % 5 - 2).reshape(M, w.shape[1]).double()
    unit = 2.0**-24
    while bool((w.remainder(unit * 2) == 0).all()) and unit < 1:
        unit *= 2
    if bool((w.remainder(unit) != 0).any()) or float((x.abs() @ w.abs().T).max()) / unit >= 2**24:
        raise ValueError("float32 cannot sum this weight exactly; take smaller codes and power-of-two scales")
    got, want = kernel(x.to(dtype)), (x @ w.T).to(dtype)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    wrong = (got != want).nonzero()  # of two zeros the sign is nobody's promise; NaN differs from all
    if wrong.numel():
        m, n = wrong[0].tolist()
        raise AssertionError(
            f"y[{m}, {n}] is {got[m, n]:g}, the exact sum is {want[m, n]:g}; "
            f"{wrong.shape[0]} of {got.numel()} differ"
        )


def assert_within_bound(kernel: Kernel, weight: Weight, x: Tensor) -> None:
    """|y - exact| is at most what rounding the weight, K float32 additions and the result can cost.

    `kernel`: any callable, called with `x` (M, K), which is taken to multiply by `weight`.
    """
    __tracebackhide__ = True
    off = excess(kernel(x), of_linear(x, weight, activations="unquantized"))
    wrong = (~(off <= 1)).nonzero()
    if wrong.numel():
        m, n = wrong[0].tolist()
        raise AssertionError(
            f"y[{m}, {n}] is {off[m, n]:g} times as far off as rounding can cost; "
            f"{wrong.shape[0]} of {off.numel()} are"
        )


def _applied(weight: Weight) -> Tensor:
    """What a weight does to inputs, float32 (N, K): its factors of inputs are part of that."""
    factors = weight.input_factors
    return weight.dequantize() if factors is None else weight.dequantize() * factors.float()
