"""Comparison of an expected with a read-back weight: tolerance, and location of errors."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qload.diagnosis.reading_faults import word_order
from qload.spec import Codes, Weight


def effective_weight(weight: Weight) -> Tensor:
    """Return the matrix that inputs are multiplied by, (N, K) float32, with the input factors applied."""
    return apply_input_factors(weight, weight.dequantize())


def apply_input_factors(weight: Weight, values: Tensor) -> Tensor:
    """Multiply (N, K) values by the input factors of a weight."""
    return values if weight.input_factors is None else values * weight.input_factors.float()


# Largest relative distance after two roundings: half a unit in the last place each of 8 bits of bfloat16 and
# 11 bits of float16, and a few units of float32.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-9, torch.float32: 2.0**-18}
HALF_TYPES = (torch.bfloat16, torch.float16)
CANCELLATION = 2.0**-4  # of the rounding of a typical value: error left after two larger values cancel
PREDICTION_ROUNDING = 2.0**-9  # a prediction may have been rounded to float16 on its way

Range = tuple[int, int]  # the first, and one past the last


@dataclass(frozen=True)
class Tolerance:
    """Largest difference between equal values.

    Attributes
    ----------
    relative
        As a share of the larger of two values.
    absolute
        In addition, for values of any size.
    """

    relative: float
    absolute: float

    def agree(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the places of equal values; NaN equals nothing, and an infinity equals itself."""
        difference = (left - right).abs()
        larger = torch.maximum(left.abs(), right.abs())
        return (left == right) | (larger.isfinite() & (difference <= self.relative * larger + self.absolute))

    def for_predictions(self, expected: Tensor, got: Tensor) -> "Tolerance":
        """Return the tolerance for predictions: for float16 at least, and scaled to the smaller weight."""
        relative = max(self.relative, PREDICTION_ROUNDING)
        return Tolerance(relative, CANCELLATION * relative * min(_rms(expected), _rms(got)))


def tolerance_for(expected: Tensor, got: Tensor) -> Tolerance:
    """Return the tolerance for the dtype of `got`; float32 with exact 16-bit values gets the 16-bit one."""
    if got.dtype in HALF_TYPES:
        types = [got.dtype]
    else:
        finite = got[got.isfinite()]
        types = [dtype for dtype in HALF_TYPES if torch.equal(finite.to(dtype).to(finite.dtype), finite)]
    relative = min((ROUNDING[dtype] for dtype in types), default=ROUNDING[torch.float32])
    return Tolerance(relative, CANCELLATION * relative * _rms(expected))


def _rms(values: Tensor) -> float:
    """Return the root mean square of the finite values."""
    finite = values[values.isfinite()].double()
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


@dataclass(frozen=True)
class Hypothesis:
    """Possible explanation of the errors.

    Attributes
    ----------
    fault
        Id of its class.
    text
        Description.
    predict
        Returns the weight (N, K) float32 that the fault would cause, NaN where it makes no prediction.
    """

    fault: str
    text: str
    predict: Callable[[], Tensor]


@dataclass(frozen=True)
class WeightComparison:
    """Expected weight, read-back weight, and facts about them.

    Attributes
    ----------
    expected, got
        (N, K) float32.
    codes
        Codes of `expected` in the same shape; None if they are not known.
    word_order
        Order of the codes in a word, if it is not 0, 1, 2, ...
    input_factors
        (K,) factors of the inputs, which `expected` includes; or None.
    parts
        Number of outputs of each part of a fused layer.
    scalars
        Scales of the whole tensor, by name.
    bias
        (N,) included in `expected` for every input; or None.
    shares
        Expected share of each rank, (N, K) like `expected`, if `rank` has one of several.
    rank
        Rank of this share.
    world, experts
        Number of ranks, or experts, whose shares this weight contains, one after another.
    first_output
        Number of the first output in its layer.
    """

    expected: Tensor
    got: Tensor
    codes: Codes | None = None
    word_order: tuple[int, ...] | None = None
    input_factors: Tensor | None = None
    parts: tuple[int, ...] = ()
    scalars: tuple[tuple[str, float], ...] = ()
    bias: Tensor | None = None
    shares: tuple[Tensor, ...] = ()
    rank: int | None = None
    world: int = 1
    experts: int = 1
    first_output: int = 0

    @property
    def code_matrix(self) -> Codes | None:
        """The codes if they have the shape (N, K); None for blocks that span outputs."""
        fits = self.codes is not None and tuple(self.codes.codes.shape) == tuple(self.expected.shape)
        return self.codes if fits else None

    def from_codes(self, codes: Codes) -> Tensor:
        """Dequantize codes into a weight comparable with `expected`."""
        values = codes.dequantize().reshape(self.expected.shape)
        if self.input_factors is not None:
            values = values * self.input_factors
        return values if self.bias is None else values + self.bias.float()[:, None]


def compare(
    expected: Tensor, got: Tensor, layer: Weight | None, rank: int | None = None, world: int | None = None
) -> WeightComparison:
    """Compare weights (N, K), or the shares of `rank`, with the facts of `layer`."""
    comparison = WeightComparison(expected.float(), got.float(), rank=rank, world=world or 1)
    if layer is None:
        return comparison
    factors = layer.input_factors
    codes = None if layer.format == "unquantized" else layer.codes()
    if codes is not None:
        codes = replace(codes, codes=codes.plain())
    scalars = [
        (name, float(tensor))
        for name, tensor in layer.fields().items()
        if tensor.numel() == 1 and tensor.is_floating_point()
    ]
    comparison = replace(
        comparison,
        codes=codes,
        word_order=word_order(layer),
        input_factors=None if factors is None else factors.float(),
        parts=layer.layer.parts,
        scalars=tuple(scalars),
    )
    if rank is None or world is None or layer.shape == tuple(expected.shape):
        return comparison
    return _compare_share(comparison, layer, rank, world)


def _compare_share(comparison: WeightComparison, layer: Weight, rank: int, world: int) -> WeightComparison:
    """Complete the comparison of a share: cut `layer` evenly along the axis with another length."""
    expected, codes, factors = comparison.expected, comparison.codes, comparison.input_factors
    axis = 0 if layer.shape[0] != expected.shape[0] else 1
    size = expected.shape[axis]
    dequantized = effective_weight(layer)
    if dequantized.shape[1 - axis] != expected.shape[1 - axis] or dequantized.shape[axis] != size * world:
        return replace(comparison, codes=None, input_factors=None, parts=())
    start = rank * size
    fits = codes is not None and tuple(codes.codes.shape) == tuple(layer.shape)
    return replace(
        comparison,
        codes=slice_codes(codes, axis, start, start + size) if fits and codes is not None else None,
        input_factors=factors[start : start + size] if axis and factors is not None else factors,
        parts=(),
        shares=torch.split(dequantized, size, axis),
    )


def slice_outputs(comparison: WeightComparison, first: int) -> WeightComparison:
    """Restrict the codes of a whole layer to the expected outputs, from `first` on."""
    size, K = comparison.expected.shape
    codes = comparison.codes
    if codes is not None:
        fits = codes.codes.shape[1] == K and codes.codes.shape[0] >= first + size
        codes = slice_codes(codes, 0, first, first + size) if fits else None
    return replace(comparison, codes=codes, parts=())


def slice_codes(codes: Codes, axis: int, start: int, stop: int) -> Codes:
    """Return some outputs (axis 0) or inputs (axis 1) of codes."""
    plain = codes.plain().narrow(axis, start, stop - start)
    if axis == 1:
        k_group = None if codes.k_group is None else codes.k_group[start:stop]
        return replace(codes, codes=plain, k_group=k_group)
    if codes.n_group is not None:
        return replace(codes, codes=plain, n_group=codes.n_group[start:stop])
    if codes.scales.shape[0] == 1:
        return replace(codes, codes=plain)
    zeros = codes.zeros
    if zeros is not None and zeros.shape[0] > 1:
        zeros = zeros[start:stop]
    return replace(codes, codes=plain, scales=codes.scales[start:stop], zeros=zeros)


@dataclass(frozen=True)
class ErrorLocation:
    """Number of wrong values, and their ranges; None for an unknown range."""

    wrong: int
    total: int
    n: Range | None = None
    k: Range | None = None
    group: Range | None = None
    rank: Range | None = None
    expert: Range | None = None
    outputs: int = 0  # number of outputs with an error
    inputs: int = 0

    def ranges(self) -> dict[str, Range]:
        """Return the known ranges by their unit."""
        units = "experts", "ranks", "outputs", "inputs", "groups"
        ranges = self.expert, self.rank, self.n, self.k, self.group
        return {unit: bounds for unit, bounds in zip(units, ranges, strict=True) if bounds is not None}


def locate_errors(comparison: WeightComparison, wrong: Tensor) -> ErrorLocation:
    """Locate wrong values, bool (N, K); experts lie along N, and ranks along N within an expert."""
    rows, columns = (torch.nonzero(wrong.any(axis)).flatten() for axis in (1, 0))
    count, total = int(wrong.sum()), wrong.numel()
    if not count:
        return ErrorLocation(0, total)
    group = expert = rank = None
    codes = comparison.code_matrix
    if codes is not None and codes.k_group is not None and codes.scales.shape[1] > 1:
        group = _range(codes.k_group[columns])
    N = wrong.shape[0]
    if comparison.experts > 1:
        N //= comparison.experts
        expert, rows = _range(rows // N), rows % N
    if comparison.rank is not None:
        rank = comparison.rank, comparison.rank + 1
    elif comparison.world > 1 and N % comparison.world == 0:
        rank = _range(rows // (N // comparison.world))
    n = _range(rows + comparison.first_output)
    outputs, inputs = len({*rows.tolist()}), int(columns.numel())
    return ErrorLocation(count, total, n, _range(columns), group, rank, expert, outputs, inputs)


def _range(indices: Tensor) -> Range:
    return int(indices.min()), int(indices.max()) + 1
