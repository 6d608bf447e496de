"""How far a layer is from its reference, summed over runs of outputs."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qload.diagnosis.dequantized import meant
from qload.spec import Codes, Weight
from qload.verify.scale_fit import ScaleFit

BLOCK = 8  # codes of a word of four bits
NARROW = (torch.float16, torch.bfloat16, torch.float32)  # what float32 is rounded to, if at all
SPIKE = 64.0  # see docs/rules/against-value.md for what it was measured on


@dataclass
class Distance:
    """Squares of differences and of the reference's values; whether all of both are equal."""

    error: float = 0.0
    norm: float = 0.0
    exact: bool = True

    def add(self, got: Tensor, want: Tensor, apart: Tensor) -> None:
        """Another run, and where in it the two differ."""
        self.error += float((got - want).square().sum(dtype=torch.float64))
        self.norm += float(want.square().sum(dtype=torch.float64))
        self.exact = self.exact and not bool(apart.any())

    def join(self, other: "Distance") -> None:
        """What another distance has added up."""
        self.error, self.norm = self.error + other.error, self.norm + other.norm
        self.exact = self.exact and other.exact

    @property
    def relative(self) -> float:
        """The error as a share of the reference; 1 is as far as zeros are; NaN counts as infinite."""
        share = (self.error / self.norm) ** 0.5 if self.norm else float("inf")
        return share if share == share else float("inf")


@dataclass
class Comparison:
    """A layer beside its reference."""

    differing: int = 0
    total: int = 0
    nonzero: int = 0  # of the reference
    agreeing: int = 0  # of those that are not zero, which every quantizer keeps
    first: tuple[tuple[int, ...], float, float] | None = None  # place, ours, the reference's
    first_run: tuple[int, int] = (0, 0)  # the outputs of the run that has it
    worst_run: tuple[int, int] = (0, 0)  # those of the run that is farthest from the reference
    farthest: float = -1.0
    # The largest block's square in steps, and its (n, k).
    spike: tuple[float, tuple[int, int]] = (0.0, (0, 0))
    steps: float = 0.0  # squares of all differences in steps of the quantizer

    def __post_init__(self) -> None:
        self.distance = Distance()
        self.fit = ScaleFit()

    def add(self, start: int, weight: Weight, reference: Weight) -> None:
        """One more run of outputs, the first of which is `start`."""
        want, got = meant(reference), meant(weight)
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
        if reference.plain and not weight.plain and got.ndim == 2:
            codes = weight.codes()
            self._spikes(start, got - want, codes)
            self.fit.add(codes, want if weight.input_factors is None else want / weight.input_factors.float())

    def _spikes(self, start: int, error: Tensor, codes: Codes) -> None:
        """Mean squares of blocks along K and along N, in steps of the quantizer."""
        if codes.lookup is not None:
            return  # steps of floats grow with their values
        squares = (error / _steps(codes, error.shape)).square().nan_to_num(0, 0, 0)
        self.steps += float(squares.sum(dtype=torch.float64))
        for n_size, k_size in ((1, BLOCK), (BLOCK, 1)):
            n_count, k_count = error.shape[0] // n_size, error.shape[1] // k_size
            blocks = squares[: n_count * n_size, : k_count * k_size].reshape(n_count, n_size, k_count, k_size)
            means = blocks.mean((1, 3))
            if means.numel() and float(means.max()) > self.spike[0]:
                n, k = divmod(int(means.argmax()), k_count)
                self.spike = (float(means.max()), (start + n * n_size, k * k_size))

    @property
    def original(self) -> bool:
        """Whether a plain reference is what was quantized: near, and yet unequal in most places."""
        return self.distance.relative < 1 and 2 * self.agreeing < self.nonzero

    @property
    def spike_ratio(self) -> float:
        """How often the worst block of differences is as large as those of the whole layer are on average."""
        return self.spike[0] / (self.steps / self.total) if self.steps else 0.0


def differ(got: Tensor, want: Tensor, reference: Weight) -> Tensor:
    """Where two floats differ, after one rounding to a plain reference's dtype; NaN differs from all."""
    if reference.plain:
        dtype = reference.fields()["weight"].dtype
        got, want = got.to(dtype), want.to(dtype)
    return got != want


def agree(weight: Weight, reference: Weight, *, finite: bool = False) -> bool:
    """Whether nothing differs, as `differ` has it; codes are rounded to a plain reference at once.

    `finite`: that no value of the weight is NaN, so that equal bits are equal values.
    """
    factors = weight.input_factors is not None or reference.input_factors is not None
    if reference.plain and not weight.plain and not factors:
        want = reference.fields()["weight"]
        if want.dtype in NARROW:
            got = weight.dequantize(want.dtype)
            return (finite and equal_bits(got, want)) or torch.equal(got, want)
    return not bool(differ(meant(weight), meant(reference), reference).any())


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype on the CPU hold the same bytes; torch compares them one by one."""
    if one.shape != other.shape:
        return False
    first, second = (each.contiguous().reshape(-1).view(torch.uint8).numpy() for each in (one, other))
    words = len(first) // 8 * 8  # long ones take an eighth of the comparisons
    here, there = (each[:words].view(np.int64) for each in (first, second))
    return np.array_equal(here, there) and np.array_equal(first[words:], second[words:])


def _first(got: Tensor, want: Tensor, apart: Tensor, start: int) -> tuple[tuple[int, ...], float, float]:
    at = torch.nonzero(apart)[0].tolist()
    *experts, n, k = at if got.ndim > 1 else [*at, 0]
    return (*experts, start + n, k), float(got[tuple(at)]), float(want[tuple(at)])


def _steps(codes: Codes, shape: torch.Size) -> Tensor:
    """What one step of the codes is worth, in a shape that goes with (N, K)."""
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
