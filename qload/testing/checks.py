"""Exact checks: equal bits, three oracles for kernels, and guard zones around tensors.

A kernel is any callable from x (M, K) to y (M, N). `read_back` passes one-hot inputs and returns the weight
of the kernel; `assert_sums_exactly` uses numbers with the same sum in every order of addition;
`assert_within_bound` allows the error of rounding and no more. No check has a tolerance, and none passes on
NaN. A failure names one element and a few numbers, and prints no whole tensors.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qload.devices.tensors import dense
from qload.diagnosis import Diagnosis, diagnose
from qload.diagnosis.comparison import effective_weight
from qload.diagnosis.product_faults import diagnose_product, diagnose_tokens, rounding_of_sums
from qload.errors import ArgumentError
from qload.formats import GPTQWeight
from qload.kernels.bounds import Bounded, excess, of_linear
from qload.layouts import StoredMinusOne, StoredMinusOnePerField, StoredMinusOneUnmasked
from qload.spec import Weight

# Conventions of zero points stored minus one; they differ for zero points of 0.
ZERO_CONVENTIONS = (StoredMinusOne(), StoredMinusOnePerField(), StoredMinusOneUnmasked())
Kernel = Callable[[Tensor], Tensor]
# Faults of the weight that exchanged tokens, or tokens with wrong results, look like.
PLACE_FAULTS = ("inputs-shifted", "outputs-reversed", "left-out", "never-written")


@contextmanager
def error_prefix(text: str) -> Iterator[None]:
    """Put a `text` before the message of a failed assertion."""
    try:
        yield
    except AssertionError as error:
        error.args = (f"{text}{error}", *error.args[1:])
        raise


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Assert that `got` and `want` have equal dtype, shape and bytes: -0.0 is not 0.0, NaN equals itself."""
    __tracebackhide__ = True
    assert (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape))
    size = want.element_size()
    a, b = (dense(t.reshape(-1)).view(torch.uint8).reshape(-1, size) for t in (got, want))
    wrong = (a != b).any(1).nonzero().flatten()
    if wrong.numel():
        index = torch.unravel_index(wrong[0], want.shape) if want.ndim else ()
        at = tuple(int(i) for i in index)
        raise AssertionError(
            f"{wrong.numel()} of {want.numel()} differ, first at {at}: got {got[at]}, expected {want[at]}"
        )


def read_back(kernel: Kernel, K: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return the weight (N, K) of a kernel: its results for one-hot inputs in `dtype`.

    `kernel`: any callable x (M, `K`) -> y (M, N); it is called with up to 256 rows of the identity on
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
    """The weight read back from a kernel differs from the expected one.

    Attributes
    ----------
    diagnosis
        The fault of the weight.
    """

    def __init__(self, text: str, diagnosis: Diagnosis) -> None:
        super().__init__(text)
        self.diagnosis = diagnosis


class WrongProduct(AssertionError):
    """The results of a kernel show a known fault.

    Attributes
    ----------
    diagnosis
        The fault of the product.
    """

    def __init__(self, text: str, diagnosis: Diagnosis) -> None:
        super().__init__(f"{text}\n  cause     {diagnosis.sentence}")
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
    """Assert that one-hot inputs of `dtype` return the columns of `weight`, rounded once, or name the fault.

    `kernel`: any callable x (M, K) -> y (M, N) that multiplies by `weight`. `whole`, `rank` and `world`: for
    a share, the whole weight, the rank of the share, and the number of ranks.
    """
    __tracebackhide__ = True
    want = effective_weight(weight).to(dtype)
    got = read_back(kernel, weight.shape[1], dtype, want.device)
    assert tuple(got.shape) == tuple(want.shape), f"N is {got.shape[0]}, expected {want.shape[0]}"
    wrong = (got != want).nonzero()
    if wrong.numel():
        n, k = wrong[wrong[:, 1].argmin()].tolist()
        diagnosis = diagnose(want, got.to(dtype), whole or weight, rank=rank, world=world)
        if not diagnosis.wrong:
            diagnosis = replace(
                diagnosis, sentence=f"rounding: by no more than two roundings to {dtype} cost"
            )
        elif diagnosis.fault in PLACE_FAULTS and _token_order_matters(kernel, got):
            mixed = "what comes of a token depends on its place among the others"
            diagnosis = diagnose_tokens((got != want).T[:256]) or replace(
                diagnosis, fault=None, share=0.0, also=(), sentence=f"no fault of the weight: {mixed}"
            )
        convention = _other_zero_convention(weight, got, dtype)
        if convention is not None:
            diagnosis = replace(
                diagnosis, fault="zero-points-wrapped", share=1.0, also=(), sentence=convention
            )
        others = f"\n  or        {', '.join(diagnosis.also)}: the same numbers here" if diagnosis.also else ""
        cause = f"{diagnosis.sentence}{others}"
        raise Misread(
            f"the kernel has {got[n, k]:g} at (n, k) = ({n}, {k}), the weight {want[n, k]:g}; "
            f"{wrong.shape[0]} of {want.numel()} are wrong, {_range(wrong)}\n  cause     {cause}",
            diagnosis,
        )


def _other_zero_convention(weight: Weight, got: Tensor, dtype: torch.dtype) -> str | None:
    """Name another convention for zero points of 0 that explains the kernel's GPTQ weight, or None."""
    if not isinstance(weight, GPTQWeight) or weight.config.zeros not in ZERO_CONVENTIONS:
        return None
    for zeros in ZERO_CONVENTIONS:
        other = replace(weight, config=replace(weight.config, zeros=zeros))
        if zeros != weight.config.zeros and torch.equal(effective_weight(other).to(dtype), got):
            ours = weight.config.zeros.name
            return (
                f"zero points of 0 are read as {zeros.name}, and this weight has them {ours}: both are in use"
            )
    return None


def _token_order_matters(kernel: Kernel, got: Tensor) -> bool:
    """Return True if the result of a token depends on the order of tokens; `got` (N, K): the weight."""
    M = min(256, got.shape[1])
    order = torch.randperm(M, generator=torch.Generator().manual_seed(0)).to(got.device)
    x = torch.eye(M, got.shape[1], dtype=got.dtype, device=got.device)[order]
    return not torch.equal(kernel(x).nan_to_num(), got.T[:M][order].nan_to_num())


def _range(wrong: Tensor, rows: str = "n", columns: str = "k") -> str:
    """The ranges of rows and columns of indices (count, 2)."""
    (row, column), (last_row, last_column) = wrong.amin(0).tolist(), wrong.amax(0).tolist()
    return f"{rows} {row} to {last_row}, {columns} {column} to {last_column}"


def exact_sums(weight: Weight, dtype: torch.dtype, M: int) -> tuple[Tensor, Tensor]:
    """Return small integers x (`M`, K) in `dtype` and their product with `weight` (M, N), rounded once to it.

    The first rows are the same for every M. Raises ValueError for a weight with sums that float32 cannot
    represent exactly.
    """
    w = effective_weight(weight).to(dtype).double()
    x = (torch.arange(M * w.shape[1], device=w.device) % 5 - 2).reshape(M, w.shape[1]).double()
    unit = _common_unit(w)
    if unit is None or float((x.abs() @ w.abs().T).max()) >= 2**24 * unit:
        raise ValueError("float32 cannot sum this weight exactly; take smaller codes and power-of-two scales")
    return x.to(dtype), (x @ w.T).to(dtype)


def _common_unit(w: Tensor) -> float | None:
    """The largest power of two up to 1 that divides every entry of w, float64; None for one below 2**-24."""
    multiples = w * 2.0**24
    if not bool((multiples.abs() < 2.0**62).all()) or bool((multiples != multiples.round()).any()):
        return None
    integers = multiples.long()
    lowest_bits = (integers & -integers)[integers != 0]
    return min(1.0, float(lowest_bits.min()) / 2.0**24) if len(lowest_bits) else 1.0


def assert_sums_exactly(kernel: Kernel, weight: Weight, dtype: torch.dtype, *, M: int = 3) -> None:
    """Assert that small integers times a weight of small integers and power-of-two scales sum exactly.

    `kernel`: any callable x (`M`, K) -> y (M, N) in `dtype` that multiplies by `weight`, rounded once to it.
    Raises ValueError for a weight with sums that float32 cannot represent exactly.
    """
    __tracebackhide__ = True
    assert_are_sums(kernel, *exact_sums(weight, dtype, M), weight)


def assert_are_sums(kernel: Kernel, x: Tensor, want: Tensor, weight: Weight) -> None:
    """Assert that a `kernel` returns `want` (M, N) for `x` (M, K) times `weight`; zeros have either sign."""
    __tracebackhide__ = True
    got = kernel(x)
    assert (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape)), (
        f"y is {got.dtype}, {tuple(got.shape)}; expected {want.dtype}, {tuple(want.shape)}"
    )
    wrong = (got != want).nonzero()  # NaN differs from all
    if wrong.numel():
        m, n = wrong[0].tolist()
        text = (
            f"y[{m}, {n}] is {got[m, n]:g}, the exact sum is {want[m, n]:g}; "
            f"{wrong.shape[0]} of {got.numel()} differ, {_range(wrong, 'm', 'n')}"
        )
        w = effective_weight(weight)
        diagnosis = diagnose_product(x, w, got, got != want, rounding_of_sums(x, w, got.dtype))
        raise AssertionError(text) if diagnosis is None else WrongProduct(text, diagnosis)


def derived_bound(
    x: Tensor,
    weight: Weight,
    *,
    accumulate: torch.dtype = torch.float32,
    split_k: int = 1,
    partials: torch.dtype = torch.float32,
    scales: torch.dtype | None = None,
) -> Bounded:
    """Return the exact product of x (M, K) and `weight` (N, K), with the largest error before y is rounded.

    Always allowed are K additions in float32 in any order, and the weight rounded to the type of x.
    ArgumentError if the additions in a narrow type may lose the whole sum, so that no bound exists.

    Parameters
    ----------
    x, weight
        The operands.
    accumulate
        The type of sums of products.
    split_k, partials
        The number of parts of K, and the type of their sums.
    scales
        The type that the kernel rounds scales to; None: it uses stored scales.
    """
    if split_k < 1:
        raise ArgumentError("split_k", "at least 1", str(split_k))
    base, K = of_linear(x, weight, activations="unquantized"), x.shape[1]
    matrix = weight.dequantize().double()
    factors = weight.input_factors
    inputs = x.double().abs() if factors is None else (x.double() * factors.double()).abs()
    size = inputs @ matrix.abs().T
    relative, absolute = 0.0, base.error
    for count, dtype in ((K, accumulate), (2 * split_k - 1, partials)):
        if dtype != torch.float32:
            limits = torch.finfo(dtype)
            relative += _relative_error(count, limits.eps / 2, dtype)
            absolute = absolute + count * limits.smallest_normal * limits.eps
    if scales is not None:
        rounding = torch.finfo(scales).eps / 2
        relative += rounding * (1 + rounding)
    return Bounded(base.value, absolute + relative * (size + base.error))


def _relative_error(additions: int, rounding: float, dtype: torch.dtype) -> float:
    """The relative error of a number of additions, each with a rounding error."""
    if additions * rounding >= 1:
        raise ArgumentError("accumulate", f"a type of enough bits for {additions} additions", str(dtype))
    return additions * rounding / (1 - additions * rounding)


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
    """Assert that |y - exact| is at most the error of rounding the weight, K additions and the result.

    `kernel`: any callable that multiplies `x` (M, K) by `weight`. `accumulate`, `split_k`, `partials` and
    `scales`: how it adds, as in `derived_bound`. Returns the largest error in units of the bound.
    """
    __tracebackhide__ = True
    options = {"accumulate": accumulate, "split_k": split_k, "partials": partials, "scales": scales}
    want = derived_bound(x, weight, **options)  # type: ignore[arg-type] # each of its own type
    got = kernel(x)
    assert tuple(got.shape) == tuple(want.value.shape), (
        f"y is {tuple(got.shape)}, expected {tuple(want.value.shape)}"
    )
    error = excess(got, want)  # in units of the bound
    wrong = (~(error <= 1)).nonzero()
    if wrong.numel():
        m, n = wrong[0].tolist()
        text = (
            f"y[{m}, {n}] is {error[m, n]:g} times as far off as rounding can cost; "
            f"{wrong.shape[0]} of {error.numel()} are"
        )
        bound = want.rounded_to(got.dtype).error
        diagnosis = diagnose_product(x, effective_weight(weight), got, ~(error <= 1), lambda _: bound)
        raise AssertionError(text) if diagnosis is None else WrongProduct(text, diagnosis)
    return float(error.max()) if error.numel() else 0.0


def assert_same_twice(kernel: Kernel, x: Tensor) -> None:
    """Assert that a `kernel` returns the same bits for the same `x` (M, K), whatever its output memory holds.

    Between the two calls memory of y's size is filled with NaN and freed: a kernel that leaves elements
    unwritten returns NaN.
    """
    __tracebackhide__ = True
    first = kernel(x).clone()
    leave_nan(first)
    assert_same_bits(kernel(x), first)


def leave_nan(like: Tensor) -> None:
    """Fill memory of the size of `like` with NaN and free it, so that the next tensor may reuse it."""
    blocks = [torch.full_like(like, float("nan")) for _ in range(4)]
    del blocks


ZONE_BYTES = 512  # on either side, a multiple of the alignments of kernels
POISON = 0xFF  # NaN in every float type, -1 or the largest number in every integer type


@dataclass(frozen=True)
class Guards:
    """Copies of tensors in the middle of poison, with a check after their use.

    A read beyond a guarded tensor of floats gives NaN, which no check passes; `assert_whole` fails after a
    write beyond a guarded tensor or to it.
    """

    _guarded: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def around(self, name: str, value: Any) -> Any:
        """Return a guarded copy of a tensor, or of all tensors in a tuple, list, mapping or typed weight.

        `value`: anything; other objects, and tensors that are not contiguous, are returned unchanged.
        `name`: of the tensors in messages.
        """
        if isinstance(value, Tensor):
            return self._guard(name, value) if value.is_contiguous() else value
        if isinstance(value, Weight):
            return value.holding({f: self.around(f"{name}.{f}", t) for f, t in value.fields().items()})
        if isinstance(value, Mapping):
            return {key: self.around(f"{name}[{key!r}]", each) for key, each in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.around(f"{name}[{at}]", each) for at, each in enumerate(value)))
        if isinstance(value, list | tuple):
            return type(value)(self.around(f"{name}[{at}]", each) for at, each in enumerate(value))
        return value

    def _guard(self, name: str, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        memory = torch.full((size + 2 * ZONE_BYTES,), POISON, dtype=torch.uint8, device=tensor.device)
        copy = memory[ZONE_BYTES : ZONE_BYTES + size].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        self._guarded.append((name, memory, memory.clone()))
        return copy

    def assert_whole(self) -> None:
        """Assert that guarded tensors, and the memory before and behind them, are unchanged."""
        __tracebackhide__ = True
        for name, memory, before in self._guarded:
            wrong = (memory != before).nonzero().flatten()
            if wrong.numel():
                first, size = int(wrong[0]) - ZONE_BYTES, memory.numel() - 2 * ZONE_BYTES
                place = "before" if first < 0 else "behind" if first >= size else "into"
                at = first - size if first >= size else first
                raise AssertionError(
                    f"the kernel wrote {place} {name}: {wrong.numel()} bytes differ, the first at byte {at}"
                )


def around_borders(*borders: int, most: int = 257) -> tuple[int, ...]:
    """Return numbers of tokens around changes of dispatch: `borders` and their neighbours, up to `most`.

    Without `borders`: 1, and around 8, 16, 24, 32, 64, 128 and 256, the borders of known kernels.
    """
    chosen = borders or (1, 8, 16, 24, 32, 64, 128, 256)
    return tuple(sorted({m for border in chosen for m in (border - 1, border, border + 1) if 1 <= m <= most}))
