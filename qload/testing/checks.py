"""Checks that can fail: bits where bits are promised, and three oracles for anything that multiplies.

A kernel is any callable from x (M, K) to y (M, N). `read_back` shows it one input at a time and gets the
weights that it thinks it has; `assert_sums_exactly` uses numbers that every order of addition sums exactly;
`assert_within_bound` allows what rounding can cost and not more. None takes a tolerance, none passes on NaN.
A failure says one place and a few numbers, never a page of tensors.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from qload.diagnosis import Diagnosis, diagnose
from qload.formats import GPTQWeight
from qload.kernels.bounds import excess
from qload.layouts import StoredMinusOne, StoredMinusOnePerField, StoredMinusOneUnmasked
from qload.spec import Weight
from qload.testing.derived import derived_bound

# Readings of zero points stored minus one; they differ for zero points of 0.
WRAPPINGS = (StoredMinusOne(), StoredMinusOnePerField(), StoredMinusOneUnmasked())
Kernel = Callable[[Tensor], Tensor]
OF_PLACES = ("inputs-shifted", "outputs-reversed")  # which tokens in other places would look like


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


def read_back(kernel: Kernel, K: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """The weight (N, K) that a kernel thinks it has: what it returns for one input at a time, in `dtype`.

    `kernel`: any callable x (M, `K`) -> y (M, N), which is called with up to 256 rows of the identity, on
    `device`.
    """
    __tracebackhide__ = True
    rows = []
    for start in range(0, K, 256):
        x = torch.eye(min(256, K - start), K, dtype=dtype, device=device).roll(start, 1)
        y = kernel(x)
        assert y.ndim == 2 and y.shape[0] == x.shape[0], (  # noqa: PT018 one sentence says both
            f"y is {tuple(y.shape)} of x {tuple(x.shape)}, expected ({x.shape[0]}, N)"
        )
        rows.append(y)
    return torch.cat(rows).T


class Misread(AssertionError):
    """A kernel that does not read back what it was given.

    Attributes
    ----------
    diagnosis
        What is wrong with its weight.
    """

    def __init__(self, text: str, diagnosis: Diagnosis) -> None:
        super().__init__(text)
        self.diagnosis = diagnosis


def assert_reads_back(
    kernel: Kernel,
    weight: Weight,
    dtype: torch.dtype,
    *,
    whole: Weight | None = None,
    rank: int | None = None,
    world: int | None = None,
) -> None:
    """One-hot inputs of `dtype` return the columns of `weight`, rounded once; else it says which fault it is.

    `kernel`: any callable x (M, K) -> y (M, N), which is taken to multiply by that weight. `whole`, `rank`
    and `world`: of a share, what it is a share of, and whose.
    """
    __tracebackhide__ = True
    want = _applied(weight).to(dtype)
    got = read_back(kernel, weight.shape[1], dtype, want.device)
    assert tuple(got.shape) == tuple(want.shape), f"N is {got.shape[0]}, expected {want.shape[0]}"
    wrong = (got != want).nonzero()
    if wrong.numel():
        n, k = wrong[wrong[:, 1].argmin()].tolist()
        found = diagnose(want, got.to(dtype), whole or weight, rank=rank, world=world)
        if not found.wrong:
            found = replace(found, sentence=f"rounding: by no more than two roundings to {dtype} cost")
        elif found.fault in OF_PLACES and _places_matter(kernel, got):
            mixed = "what comes of a token depends on its place among the others"
            found = replace(
                found, fault=None, share=0.0, also=(), sentence=f"no fault of the weight: {mixed}"
            )
        convention = _other_wrapping(weight, got, dtype)
        if convention is not None:
            found = replace(found, fault="zero-points-wrapped", share=1.0, also=(), sentence=convention)
        others = f"\n  or        {', '.join(found.also)}: the same numbers here" if found.also else ""
        cause = f"{found.sentence}{others}"
        raise Misread(
            f"the kernel has {got[n, k]:g} at (n, k) = ({n}, {k}), the weight {want[n, k]:g}; "
            f"{wrong.shape[0]} of {want.numel()} are wrong, {_range(wrong)}\n  cause     {cause}",
            found,
        )


def _other_wrapping(weight: Weight, got: Tensor, dtype: torch.dtype) -> str | None:
    """Name another reading of zero points of 0 that explains a kernel's GPTQ weight; None without one."""
    if not isinstance(weight, GPTQWeight) or weight.config.zeros not in WRAPPINGS:
        return None
    for zeros in WRAPPINGS:
        other = replace(weight, config=replace(weight.config, zeros=zeros))
        if zeros != weight.config.zeros and torch.equal(_applied(other).to(dtype), got):
            ours = weight.config.zeros.name
            return (
                f"zero points of 0 are read as {zeros.name}, and this weight has them {ours}: both are in use"
            )
    return None


def _places_matter(kernel: Kernel, got: Tensor) -> bool:
    """Whether tokens that come in another order do not take with them what was read back, `got` (N, K)."""
    M = min(256, got.shape[1])
    order = torch.randperm(M, generator=torch.Generator().manual_seed(0)).to(got.device)
    x = torch.eye(M, got.shape[1], dtype=got.dtype, device=got.device)[order]
    return not torch.equal(kernel(x).nan_to_num(), got.T[:M][order].nan_to_num())


def _range(wrong: Tensor, rows: str = "n", columns: str = "k") -> str:
    """Between which rows and columns places (count, 2) lie."""
    (row, column), (last_row, last_column) = wrong.amin(0).tolist(), wrong.amax(0).tolist()
    return f"{rows} {row} to {last_row}, {columns} {column} to {last_column}"


def exact_sums(weight: Weight, dtype: torch.dtype, M: int) -> tuple[Tensor, Tensor]:
    """Small integers (`M`, K) in `dtype`, and what they times a `weight` are, (M, N), rounded once to that.

    The first rows are the same for every M. Raises ValueError for a weight whose sums float32 cannot hold
    exactly: then nothing would be shown.
    """
    w = _applied(weight).to(dtype).double()
    x = (torch.arange(M * w.shape[1], device=w.device) % 5 - 2).reshape(M, w.shape[1]).double()
    unit = 2.0**-24
    while bool((w.remainder(unit * 2) == 0).all()) and unit < 1:
        unit *= 2
    if bool((w.remainder(unit) != 0).any()) or float((x.abs() @ w.abs().T).max()) / unit >= 2**24:
        raise ValueError("float32 cannot sum this weight exactly; take smaller codes and power-of-two scales")
    return x.to(dtype), (x @ w.T).to(dtype)


def assert_sums_exactly(kernel: Kernel, weight: Weight, dtype: torch.dtype, *, M: int = 3) -> None:
    """Small integers times a weight of small integers and power-of-two scales: bit equality.

    `kernel`: any callable x (`M`, K) -> y (M, N) in `dtype`, which is taken to multiply by `weight`, rounded
    once to that. Raises ValueError for a weight whose sums float32 cannot hold exactly.
    """
    __tracebackhide__ = True
    assert_are_sums(kernel, *exact_sums(weight, dtype, M))


def assert_are_sums(kernel: Kernel, x: Tensor, want: Tensor) -> None:
    """What a `kernel` makes of `x` (M, K) is `want` (M, N); the sign of a zero is nobody's promise."""
    __tracebackhide__ = True
    got = kernel(x)
    assert (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape)), (
        f"y is {got.dtype}, {tuple(got.shape)}; expected {want.dtype}, {tuple(want.shape)}"
    )
    wrong = (got != want).nonzero()  # NaN differs from all
    if wrong.numel():
        m, n = wrong[0].tolist()
        raise AssertionError(
            f"y[{m}, {n}] is {got[m, n]:g}, the exact sum is {want[m, n]:g}; "
            f"{wrong.shape[0]} of {got.numel()} differ, {_range(wrong, 'm', 'n')}"
        )


def assert_within_bound(
    kernel: Kernel,
    weight: Weight,
    x: Tensor,
    *,
    accumulate: torch.dtype = torch.float32,
    split_k: int = 1,
    partials: torch.dtype = torch.float32,
    scales: torch.dtype | None = None,
) -> float:
    """|y - exact| is at most what rounding the weight, K additions and the result can cost.

    `kernel`: any callable, called with `x` (M, K), which is taken to multiply by `weight`. `accumulate`,
    `split_k`, `partials` and `scales` say how it adds, as `derived_bound` has them. Returns the largest error
    in units of the bound.
    """
    __tracebackhide__ = True
    options = {"accumulate": accumulate, "split_k": split_k, "partials": partials, "scales": scales}
    want = derived_bound(x, weight, **options)  # type: ignore[arg-type] # each of its own type
    got = kernel(x)
    assert tuple(got.shape) == tuple(want.value.shape), (
        f"y is {tuple(got.shape)}, expected {tuple(want.value.shape)}"
    )
    off = excess(got, want)
    wrong = (~(off <= 1)).nonzero()
    if wrong.numel():
        m, n = wrong[0].tolist()
        raise AssertionError(
            f"y[{m}, {n}] is {off[m, n]:g} times as far off as rounding can cost; "
            f"{wrong.shape[0]} of {off.numel()} are"
        )
    return float(off.max()) if off.numel() else 0.0


def assert_same_twice(kernel: Kernel, x: Tensor) -> None:
    """The same `x` (M, K) gives the same bits, whatever the memory held that the `kernel` writes to.

    Between the two calls memory of y's size is filled with NaN and given back, which is what a kernel returns
    that leaves elements unwritten.
    """
    __tracebackhide__ = True
    first = kernel(x).clone()
    leave_nan(first)
    assert_same_bits(kernel(x), first)


def leave_nan(like: Tensor) -> None:
    """Fill memory of the size of `like` with NaN and give it back, so that the next tensor may get it."""
    held = [torch.full_like(like, float("nan")) for _ in range(4)]
    del held


def _applied(weight: Weight) -> Tensor:
    """What a weight does to inputs, float32 (N, K): its factors of inputs are part of that."""
    factors = weight.input_factors
    return weight.dequantize() if factors is None else weight.dequantize() * factors.float()
