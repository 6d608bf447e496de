"""Distance of a layer to its reference, summed over blocks of outputs; fit of its scales; map of its errors.

The scale that fits a group best is a least-squares one: the sum of code times weight over the sum of squared
codes. In a sound layer it follows the group's own scale, with the noise of rounding. An input or output may
have been multiplied by a factor before quantization, as AWQ does; these factors belong to whole rows or
columns of groups, and are removed.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from qload.devices.tensors import dense
from qload.diagnosis.comparison import effective_weight
from qload.spec import Codes, Weight

BLOCK_CODES = 8  # codes of a word of four bits
ROUNDED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of a plain reference
# Squared error of the worst block over the mean of the layer. Rounding to the nearest code reaches 3; a word
# of four bits that was never quantized from the original has about 350.
MAX_SPIKE = 64.0

# Fit of scales
MIN_FIT_GROUPS = 512  # groups with a usable correlation
MIN_GROUPS_PER_OUTPUT = 4  # with fewer, the factor of an output explains all of them
MIN_FIT = 0.2  # sound layers had 0.5 and more, with errors as large as the weights; another layer's about 0
MIN_LOG_SPREAD = 0.01  # of logarithms; scales with less do not vary enough

# Map of errors
GRID = 16  # parts of an axis
LEVELS = 9  # each has twice the error of the one before; the last is as large as the reference, or larger
MATRIX_AXES = 2


@dataclass
class ScaleFit:
    """Sums of squares and products of the logarithms of stored and of fitted scales, block by block."""

    count: int = 0
    stored: float = 0.0
    fitted: float = 0.0
    both: float = 0.0

    def add(self, codes: Codes, want: Tensor) -> None:
        """Add a block of outputs of the reference, (N, K) float32; it is skipped if groups span outputs."""
        if codes.n_group is not None or codes.divide or want.ndim != 2:
            return
        N, K = want.shape
        scales = codes.scales.float()
        if scales.shape[0] != N or not MIN_GROUPS_PER_OUTPUT <= scales.shape[1] < K or codes.k_group is None:
            return
        index = codes.k_group.long()
        values = _values(codes, index)
        above, below = (
            torch.zeros(scales.shape).index_add_(1, index, terms) for terms in (values * want, values**2)
        )
        fitted = above / below
        kept = (scales != 0) & (fitted * scales > 0) & fitted.isfinite() & scales.isfinite()
        if not bool(kept.all(1).any()):
            return
        rows = kept.all(1)
        x, y = (_centred(scale[rows].abs().log()) for scale in (scales, fitted))
        self.count += x.numel()
        self.stored += float(x.square().sum())
        self.fitted += float(y.square().sum())
        self.both += float((x * y).sum())

    def mistake(self) -> str | None:
        """Return the fault in words; None if the scales follow the original, or nothing can be said."""
        correlation = self.correlation
        if correlation is None or correlation >= MIN_FIT:
            return None
        return (
            f"its {self.count} scales have a correlation of {correlation:.2f} with the scales that fit its "
            f"codes to the reference, sound ones {MIN_FIT} and far more: they are another layer's"
        )

    @property
    def correlation(self) -> float | None:
        """Correlation of stored and fitted scales; None for too few groups, or nearly equal scales."""
        least = self.count * MIN_LOG_SPREAD**2
        if self.count < MIN_FIT_GROUPS or self.stored < least or self.fitted < least:
            return None
        return self.both / math.sqrt(self.stored * self.fitted)


def _values(codes: Codes, index: Tensor) -> Tensor:
    """Return the values of the codes before scaling, (N, K)."""
    plain = codes.plain()
    if codes.lookup is not None:
        return codes.lookup.float()[plain.long()]
    values = plain.float()
    if codes.zeros is None:
        return values
    return values - codes.zeros.expand(len(plain), codes.scales.shape[1]).float().index_select(1, index)


def _centred(values: Tensor) -> Tensor:
    """Subtract the mean of each row and of each column."""
    return values - values.mean(1, keepdim=True) - values.mean(0) + values.mean()


@dataclass(frozen=True)
class LayerMap:
    """Map of a layer's errors as text: its relative error, and a row of digits for each part of its outputs.

    A digit stands for a part of its inputs: 0 for equal parts, 9 for an error as large as the reference, or
    larger; each step between them halves it. "" without a map.
    """

    layer: str
    text: str


class ErrorMap:
    """Squares of errors and of the reference of a layer (N, K), part by part."""

    def __init__(self, N: int, K: int) -> None:
        self.N, self.K = N, K
        self._squares = torch.zeros(2, min(GRID, N), min(GRID, K))  # of the error, and of the reference
        self._columns = torch.arange(K) * self._squares.shape[2] // max(1, K)
        self._drawn = bool(self._squares.numel())

    def add(self, start: int, got: Tensor, want: Tensor) -> None:
        """Add a block of outputs from `start` on and the reference's; only matrices are drawn."""
        self._drawn = self._drawn and want.ndim == MATRIX_AXES
        if not self._drawn:
            return
        rows = (torch.arange(len(want)) + start) * self._squares.shape[1] // self.N
        for into, values in zip(self._squares, (got.float() - want.float(), want.float()), strict=True):
            across = torch.zeros(len(want), into.shape[1]).index_add_(1, self._columns, values.square())
            into.index_add_(0, rows, across)

    def text(self) -> str:
        """Return the text of a `LayerMap`; a map without blocks shows equal layers."""
        if not self._drawn:
            return ""
        error, norm = self._squares
        relative = float((error.sum() / norm.sum()).sqrt()) if error.any() else 0.0
        lines = ("".join(map(str, row)) for row in _levels(error, norm).tolist())
        return f"{relative:.4g}: {' '.join(lines)}"


def _levels(error: Tensor, norm: Tensor) -> Tensor:
    """Return the digits of a map; NaN counts as the largest error."""
    share = torch.where(error == 0, 0.0, (error / norm).sqrt())
    level = (LEVELS + share.log2().floor()).clamp(1, LEVELS).nan_to_num(LEVELS)
    return torch.where(share == 0, 0.0, level).to(torch.int64)


@dataclass
class Distance:
    """Sums of squared differences and of squared reference values; `exact`: True if all values are equal."""

    error: float = 0.0
    norm: float = 0.0
    exact: bool = True

    def add(self, got: Tensor, want: Tensor, apart: Tensor) -> None:
        """Add a block; `apart`: mask of different values."""
        self.error += float((got - want).square().sum(dtype=torch.float64))
        self.norm += float(want.square().sum(dtype=torch.float64))
        self.exact = self.exact and not bool(apart.any())

    def join(self, other: "Distance") -> None:
        """Add the sums of another distance."""
        self.error, self.norm = self.error + other.error, self.norm + other.norm
        self.exact = self.exact and other.exact

    @property
    def relative(self) -> float:
        """Error relative to the reference; zeros have 1; NaN counts as infinite."""
        share = (self.error / self.norm) ** 0.5 if self.norm else float("inf")
        return share if share == share else float("inf")


@dataclass
class Comparison:
    """Comparison of a layer with its reference."""

    differing: int = 0
    total: int = 0
    nonzero: int = 0  # values of the reference
    agreeing: int = 0  # nonzero values that agree; every quantizer keeps zeros
    first: tuple[tuple[int, ...], float, float] | None = (
        None  # first difference: place, ours, the reference's
    )
    first_run: tuple[int, int] = field(init=False)  # range of outputs of its block
    worst_run: tuple[int, int] = field(init=False)  # those of the block farthest from the reference
    farthest: float = -math.inf
    # Mean square of the worst block of codes, in steps of the quantizer, and its (n, k).
    spike: tuple[float, tuple[int, int]] = (0.0, (0, 0))
    steps: float = 0.0  # squares of all differences in steps of the quantizer

    def __post_init__(self) -> None:
        self.distance = Distance()
        self.fit = ScaleFit()

    def add(self, start: int, weight: Weight, reference: Weight) -> None:
        """Add a block of outputs from `start` on."""
        want, got = effective_weight(reference), effective_weight(weight)
        apart, run = differ(got, want, reference), Distance()
        run.add(got, want, apart)
        self.distance.join(run)
        self.total += got.numel()
        self.differing += int(apart.sum())
        self.nonzero += int(want.count_nonzero())
        self.agreeing += int((want.ne(0) & ~apart).sum())
        outputs = (start, start + weight.layer.N)
        if self.first is None and not run.exact:
            self.first, self.first_run = _first(got, want, apart, start), outputs
        if run.relative > self.farthest:
            self.farthest, self.worst_run = run.relative, outputs
        if reference.plain and not weight.plain and got.ndim == 2 and not weight.codes_are_transformed:
            codes = weight.codes()
            self._spikes(start, got - want, codes)
            self.fit.add(codes, want if weight.input_factors is None else want / weight.input_factors.float())

    def _spikes(self, start: int, error: Tensor, codes: Codes) -> None:
        """Update the worst block of codes along K and along N, in steps of the quantizer."""
        if codes.lookup is not None:
            return  # steps of floats grow with their values
        squares = (error / _steps(codes, error.shape)).square().nan_to_num(0, 0, 0)
        self.steps += float(squares.sum(dtype=torch.float64))
        for n_size, k_size in ((1, BLOCK_CODES), (BLOCK_CODES, 1)):
            n_count, k_count = error.shape[0] // n_size, error.shape[1] // k_size
            blocks = squares[: n_count * n_size, : k_count * k_size].reshape(n_count, n_size, k_count, k_size)
            means = blocks.mean((1, 3))
            if means.numel() and float(means.max()) > self.spike[0]:
                n, k = divmod(int(means.argmax()), k_count)
                self.spike = (float(means.max()), (start + n * n_size, k * k_size))

    @property
    def original(self) -> bool:
        """True if a plain reference is the float original: near, and yet unequal in most places."""
        return self.distance.relative < 1 and 2 * self.agreeing < self.nonzero

    @property
    def spike_ratio(self) -> float:
        """Squared error of the worst block over the mean of the layer."""
        return self.spike[0] / (self.steps / self.total) if self.steps else 0.0


def differ(got: Tensor, want: Tensor, reference: Weight) -> Tensor:
    """Return a mask of different values after one rounding to a plain reference's dtype; NaN differs."""
    if reference.plain:
        dtype = reference.fields()["weight"].dtype
        got, want = got.to(dtype), want.to(dtype)
    return got != want


def agree(weight: Weight, reference: Weight, *, finite: bool = False) -> bool:
    """Return whether two weights have no difference in the sense of `differ`.

    `finite`: True if no value of the weight is NaN, so that equal bits are equal values.
    """
    factors = weight.input_factors is not None or reference.input_factors is not None
    if reference.plain and not weight.plain and not factors:
        want = reference.fields()["weight"]
        if want.dtype in ROUNDED_DTYPES:
            got = weight.dequantize(want.dtype)
            return (finite and equal_bits(got, want)) or torch.equal(got, want)
    return not bool(differ(effective_weight(weight), effective_weight(reference), reference).any())


def equal_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two CPU tensors of one dtype have the same bytes, eight bytes at a time."""
    if first.shape != second.shape:
        return False
    ours, theirs = (dense(tensor.reshape(-1)).view(torch.uint8).numpy() for tensor in (first, second))
    aligned = len(ours) // 8 * 8
    words, others = (data[:aligned].view(np.int64) for data in (ours, theirs))
    return np.array_equal(words, others) and np.array_equal(ours[aligned:], theirs[aligned:])


def _first(got: Tensor, want: Tensor, apart: Tensor, start: int) -> tuple[tuple[int, ...], float, float]:
    at = torch.nonzero(apart)[0].tolist()
    *experts, n, k = at if got.ndim > 1 else [*at, 0]
    return (*experts, start + n, k), float(got[tuple(at)]), float(want[tuple(at)])


def _steps(codes: Codes, shape: torch.Size) -> Tensor:
    """Return the size of one step of the codes, in a shape that broadcasts with (N, K)."""
    scales = codes.scales.float()
    if codes.divide:
        scales = 1 / scales
    if codes.n_group is not None:
        scales = scales.index_select(0, codes.n_group)
    if codes.k_group is not None:
        scales = scales.index_select(1, codes.k_group)
    if scales.shape[0] not in (1, shape[0]) or scales.shape[1] not in (1, shape[1]):
        return torch.ones((), device=scales.device)
    return scales.abs() * codes.factor
