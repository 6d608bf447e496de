"""Exact values of products and experts, and derived bounds of the rounding errors of their kernels.

u is half a unit of a type, and n roundings cost a factor of 1 + n u / (1 - n u) at most. Of float32 u is
2**-24. A value is exact for exact inputs; its error bounds how far the same formula lies from it, whatever
the order of its sums, where each step is in float32 and what a type says is rounded to is rounded to it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import e, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from qload.dtypes import TORCH
from qload.kernels import declared
from qload.kernels.declared import Activations, Maximum
from qload.kernels.experts_function import routed
from qload.kernels.plans import quantizes
from qload.kernels.products import NARROW
from qload.spec import Codes, Weight, outputs, ranges
from qload.spec.transforms import BlockTransform

UNIT = 2.0**-24
TINY = torch.finfo(torch.float32).tiny
KEPT = 2.0**-13  # of the largest addend, what tensor cores cut off of each addend of a sum of e4m3
ADDED_ROWS, PROMOTED_ROWS = 32, 128  # rows of a sum by tensor cores, and of sums that float32 adds
SLICE = 16 << 20  # numbers of a weight that are dequantized at once
STEPS = 6  # roundings to float32 beside those of sums: scales, a zero point, a factor of the inputs, a bias


@dataclass(frozen=True, eq=False)
class Bounded:
    """Exact values, with bounds of the errors of computed ones.

    Attributes
    ----------
    value, error
        float64, of one shape.
    """

    value: Tensor
    error: Tensor

    def __mul__(self, other: "Bounded") -> "Bounded":
        """Their product, rounded once."""
        value = self.value * other.value
        carried = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return rounded(value, carried)

    def __add__(self, other: "Bounded") -> "Bounded":
        """Their sum, rounded once."""
        return rounded(self.value + other.value, self.error + other.error)

    def __getitem__(self, at: slice | int) -> "Bounded":
        """Some of the last axis."""
        return Bounded(self.value[..., at], self.error[..., at])

    def clamp(self, least: float | None, most: float | None) -> "Bounded":
        """Clamp to numbers of float32, or to numbers with equal roundings on both sides."""
        return Bounded(self.value.clamp(least, most), self.error)

    def rounded_to(self, dtype: torch.dtype) -> "Bounded":
        """Result of one more rounding, to a `dtype`; below its normal numbers, with the unit of these."""
        own = torch.finfo(dtype)
        return Bounded(
            self.value, self.error + (self.value.abs() + self.error) * own.eps / 2 + own.smallest_normal
        )


def roundings(count: int) -> float:
    """Relative cost of `count` roundings to float32."""
    return count * UNIT / (1 - count * UNIT)


def rounded(value: Tensor, carried: Tensor) -> Bounded:
    """Result of one operation in float32: its `value`, with the `carried` error of its inputs."""
    return Bounded(value, carried + (value.abs() + carried) * UNIT + TINY)


def exact(tensor: Tensor | float) -> Bounded:
    """A `tensor` as it is."""
    value = torch.as_tensor(tensor).double()
    return Bounded(value, torch.zeros_like(value))


def product(
    x: Bounded,
    matrix: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    terms: "Terms | None" = None,
    steps: int = 2,
    more: float = 0.0,
) -> Bounded:
    """x (M, K) times a `matrix` (N, K), plus a `bias` (N,): K products, their sum, and further roundings.

    Parameters
    ----------
    x, matrix, bias
        What is multiplied, of floats that are exact but for the error of x.
    dtype
        What the matrix is rounded to first, and the product before the bias is added; None: float32 has both.
    terms
        Terms of the matrix, if they are summed apart.
    steps
        How many roundings to float32 there are beside those of K sums.
    more
        What sums are off by besides, as a share of the sum of absolute values.
    """
    w = matrix.double()
    added = w.new_zeros(()) if bias is None else bias.double()
    inputs, sizes = x.value.abs() + x.error, w.abs()
    size = inputs @ sizes.T + added.abs()
    summed = size
    if terms is not None:
        summed = inputs @ terms.sizes.T + added.abs()
        steps += 3  # a product of offset and scale, one with a sum of inputs, the difference
    error = x.error @ sizes.T + TINY + (roundings(x.value.shape[-1] + steps) + more) * summed
    if terms is not None:
        error = error + inputs @ terms.error.T
    if dtype is not None:
        own = torch.finfo(dtype)
        error = error + own.eps / 2 * (1 if bias is None else 2) * size
        error = error + inputs.sum(-1, keepdim=True) * own.smallest_normal * own.eps / 2
    return Bounded(x.value @ w.T + added, error)


@dataclass(frozen=True, eq=False)
class Terms:
    """Terms of a weight that kernels sum apart: products of codes with scales, and offsets.

    Attributes
    ----------
    sizes
        Sum of the absolute values of both, (N, K), float64.
    error
        Distance of the dequantized weight, which its format rounds, from their sum: (N, K), float64.
    """

    sizes: Tensor
    error: Tensor

    def __getitem__(self, rows: slice) -> "Terms":
        """Terms of some outputs."""
        return Terms(self.sizes[rows], self.error[rows])

    @classmethod
    def of(cls, weight: Weight) -> "Terms | None":
        """Terms of a weight in a kernel order; None without offsets."""
        if not getattr(weight.config, "has_offsets", False):
            return None
        codes: Codes = weight.codes()
        plain = replace(codes, offsets=None, rounding=None)
        offsets = codes.offsets
        if offsets is None:  # float zero points
            assert codes.zeros is not None
            offsets, plain = codes.zeros * codes.scales, replace(plain, zeros=None)
        sizes = plain.dequantize().double().abs() + offsets.double().abs()[:, codes.k_group]
        if codes.rounding is None:
            return cls(sizes, torch.zeros_like(sizes))
        own, scales = torch.finfo(TORCH[codes.rounding]), codes.scales.double().abs()[:, codes.k_group]
        half = own.eps / 2  # two steps are rounded
        return cls(sizes, 2 * half * (1 + half) * sizes + 2 * half * own.smallest_normal * (1 + scales))


def cut_off(x: Tensor, matrix: Tensor) -> Tensor:
    """What tensor cores cut off of sums of e4m3, at most: x (M, K) times a `matrix` (N, K).

    They align the addends of 32 rows, and the sum before, to the largest one, and cut off what is below
    `KEPT` of it; so is the new sum. After 128 rows float32 has the sum, and the next one starts at 0.
    """
    w, addends, K = matrix.double(), ADDED_ROWS + 2, x.shape[1]
    lost = w.new_zeros(x.shape[0], w.shape[0])
    for stage in range(0, K, PROMOTED_ROWS):
        total, off = torch.zeros_like(lost), torch.zeros_like(lost)
        for start in range(stage, min(stage + PROMOTED_ROWS, K), ADDED_ROWS):
            a, b = x[:, start : start + ADDED_ROWS], w[:, start : start + ADDED_ROWS]
            largest = torch.maximum(a.abs().amax(-1, keepdim=True) * b.abs().amax(-1), total.abs() + off)
            total = total + a @ b.T
            off = off + addends * KEPT * torch.maximum(largest, total.abs() + off)
        lost += off
    return lost


def of_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    activations: Activations = "declared",
    maximum: Maximum = None,
    *,
    converted: bool = False,
) -> Bounded:
    """Exact product of x (M, K) and a `weight`, (M, N), and a kernel's error before it rounds the result.

    The weight is rounded to the type of x, and what a declared quantizer makes of x as well; the weight is
    dequantized in slices. `bias` (N,), `activations` and `maximum` as `Weight.get_linear` has them.
    `converted`: whether the kernel's scales were rounded to the type of x before.
    """
    if weight.layer.transforms is not None:
        return _of_transformed(x, weight, bias, activations, converted)
    steps, more, cut = 2 + (weight.input_factors is not None), 0.0, False
    if converted:
        half = torch.finfo(x.dtype).eps / 2
        more += half * (1 + half)
    if quantizes(weight, activations) and weight.activations is not None:
        steps += 3  # a scale of the inputs, one of the weight, a zero point
        cut = x.is_cuda and weight.activations.type == "float" and x.dtype in NARROW
    taken = list(_inputs(x, weight, activations, maximum))
    coded = weight.without_low_rank() if quantizes(weight, activations) else weight
    value = torch.empty(x.shape[0], weight.layer.N, dtype=torch.float64, device=x.device)
    error = torch.empty_like(value)
    for start, stop in ranges(weight, max(1, SLICE // max(1, weight.layer.K))):
        part = outputs(coded, start, stop)
        matrix, terms = part.dequantize(), Terms.of(part)
        for inputs, rows in taken:
            here = slice(max(start, rows.start), min(stop, rows.stop))
            if here.start < here.stop:
                rows_here = slice(here.start - start, here.stop - start)
                own, own_terms = matrix[rows_here], None if terms is None else terms[rows_here]
                added = None if bias is None else bias[here]
                made = product(inputs, own, added, x.dtype, terms=own_terms, steps=steps, more=more)
                value[:, here], error[:, here] = made.value, made.error
                if cut:
                    error[:, here] += cut_off(inputs.value, own)
    if coded is weight or weight.low_rank is None:
        return Bounded(value, error)
    (inputs, _), (down, up) = next(_inputs(x, weight, "unquantized", None)), weight.low_rank
    return Bounded(value, error) + product(product(inputs, down, steps=STEPS), up)


def _of_transformed(
    x: Tensor, weight: Weight, bias: Tensor | None, activations: Activations, converted: bool
) -> Bounded:
    """`of_linear` of a layer with transforms: of inputs, of the product with codes, and of outputs."""
    transforms, coded = weight.layer.transforms, weight.without_transforms()
    assert transforms is not None
    half = torch.finfo(x.dtype).eps / 2
    rows, more = exact(x), half * (1 + half) if converted else 0.0
    if transforms.inputs is not None:
        rows = transform_blocks(rows, transforms.inputs).rounded_to(x.dtype)
    if coded.input_factors is not None:
        rows = rows * exact(coded.input_factors)
    inputs = [(rows, slice(0, weight.layer.N))]
    if quantizes(coded, activations):
        inputs = [(quantized.rounded_to(x.dtype), n) for quantized, n in _as_declared(rows, coded)]
    matrix, added = coded.dequantize(), bias if transforms.outputs is None else None
    parts = [
        product(each, matrix[n], None if added is None else added[n], x.dtype, steps=STEPS, more=more)
        for each, n in inputs
    ]
    y = Bounded(torch.cat([part.value for part in parts], -1), torch.cat([part.error for part in parts], -1))
    if transforms.outputs is None:
        return y
    y = transform_blocks(y.rounded_to(x.dtype), transforms.outputs)
    return y if bias is None else y + exact(bias)


def transform_blocks(x: Bounded, transform: BlockTransform) -> Bounded:
    """Apply a transform to rows, with sums in float32."""
    blocks = Bounded(*(part.reshape(-1, transform.size) for part in (x.value, x.error)))
    sums = product(blocks, torch.from_numpy(transform.signs.T).to(x.value.device))
    scaled = sums * exact(torch.tensor(1 / sqrt(transform.size), device=x.value.device))
    return Bounded(scaled.value.reshape(x.value.shape), scaled.error.reshape(x.value.shape))


def _inputs(
    x: Tensor, weight: Weight, activations: Activations, maximum: Maximum
) -> Iterator[tuple[Bounded, slice]]:
    """Yield factors of the products, and their outputs."""
    factors = weight.input_factors
    if not quantizes(weight, activations):
        yield exact(x if factors is None else x.double() * factors.double()), slice(0, weight.layer.N)
        return
    taken = x if factors is None else x.to(torch.promote_types(x.dtype, torch.float32)) * factors.float()
    for made, rows in declared.quantized(taken, weight, maximum):
        yield exact(made.dequantize()).rounded_to(x.dtype), rows


def excess(y: Tensor, want: Bounded) -> Tensor:
    """Distance of y from exact values in units of the bound; NaN and values above 1 are errors.

    Infinity is 0 off where rounding can lead beyond the largest number of y's type, and on that side.
    """
    budget = want.rounded_to(y.dtype).error
    off = (y.double() - want.value).abs() / budget
    beyond = want.value.abs() + budget > torch.finfo(y.dtype).max
    return off.masked_fill(y.isinf() & beyond & (y.sign() == want.value.sign()), 0)


def function(x: Bounded, of: Callable[[Tensor], Tensor], slope: float, cost: Tensor) -> Bounded:
    """Function `of` x with a slope of at most `slope`, and an error `cost` of its own."""
    return Bounded(of(x.value), slope * x.error + cost + TINY)


def sigmoid(x: Bounded) -> Bounded:
    """Sigmoid, of slope 1/4: an exponential with an error of 1 ulp (2 u), a sum and a division."""
    value = torch.sigmoid(x.value)
    return function(x, torch.sigmoid, 1 / 4, value * roundings(5))


def silu(x: Bounded) -> Bounded:
    """SiLU, of slope s + x s (1 - s) <= 1 + x exp(-x) <= 1 + 1/e; a sigmoid and a product."""
    of = torch.nn.functional.silu
    return function(x, of, 1 + 1 / e, of(x.value).abs() * roundings(6))


def gelu(x: Bounded) -> Bounded:
    """GELU, of slope <= 1 + |x| phi(x) <= 1 + phi(1); x / 2 (1 + erf(x / sqrt 2)) costs at most 8 u."""
    of = torch.nn.functional.gelu
    return function(x, of, 1 + 1 / sqrt(2 * pi * e), x.value.abs() * roundings(8 + 2))


def gelu_tanh(x: Bounded) -> Bounded:
    """GELU by tanh: x / 2 (1 + tanh p), x p' <= 3 p, and p / cosh(p)**2 <= 1/2 give a slope below 1 + 3/4."""

    def of(value: Tensor) -> Tensor:
        return torch.nn.functional.gelu(value, approximate="tanh")

    return function(x, of, 1 + 3 / 4, x.value.abs() * roundings(12 + 2))


PLAIN: Mapping[str, Callable[[Bounded], Bounded]] = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}


def clamped_swiglu(gate: Bounded, up: Bounded, alpha: float, limit: float) -> Bounded:
    """(up + 1) * gate * sigmoid(alpha * gate), with alpha rounded to float32, both cut off at `limit`."""
    gate, up = gate.clamp(None, limit), up.clamp(-limit, limit)
    given = torch.tensor(alpha, dtype=torch.float64, device=gate.value.device)
    rounded_alpha = rounded(given, torch.zeros_like(given))
    return (up + exact(torch.ones_like(given))) * (gate * sigmoid(gate * rounded_alpha))


def bound_gated_activation(
    gate: Bounded, up: Bounded, kind: str, alpha: float | None, limit: float | None
) -> Bounded:
    """Result of a `GatedActivation` of a `kind` for gate and up, with `alpha` and `limit` or without."""
    if alpha is not None and limit is not None:
        return clamped_swiglu(gate, up, alpha, limit)
    return PLAIN[kind](gate) * up


@dataclass(frozen=True)
class Rounding:
    """Dtypes of roundings within an expert.

    Attributes
    ----------
    between
        What comes out of a product, and of the activation, and inputs that a declaration quantizes.
    inputs, weights
        Both sides of a product of inputs as they come.
    declared
        Weights that meet declared inputs.
    """

    between: torch.dtype
    inputs: torch.dtype
    weights: torch.dtype
    declared: torch.dtype


def multiplied(x: Tensor) -> torch.dtype:
    """Dtype of both sides of an expert's product, for inputs without quantization."""
    return x.dtype if x.is_cuda or x.dtype == torch.bfloat16 else torch.float32


def of_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Any,
    activations: Activations = "declared",
    *,
    between: torch.dtype | None = None,
    dequantized: torch.dtype | None = None,
) -> Bounded:
    """Exact result of `experts` for x (T, H), and their kernel's error before it rounds to x's type.

    `topk_ids`, `topk_weights`: (T, k); `experts`: an `ExpertsWeight` of whole experts, of which one is
    dequantized at a time. `between`: what goes between two products is rounded to that; None: to x's type on
    a GPU, and before a product to `multiplied(x)`. `dequantized`: what weights are rounded to; None: as what
    they are multiplied with.
    """
    value = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    error, on_input = torch.zeros_like(value), experts.facts.side == "input"
    narrow = between or (x.dtype if x.is_cuda else torch.float32)
    own = between or multiplied(x)
    rounding = Rounding(narrow, own, dequantized or own, dequantized or narrow)
    for run in routed(topk_ids, experts.local.map.tolist()).runs(1):
        (place,), pairs = run.places, (run.tokens, run.slots)
        tokens, slots = (torch.from_numpy(each).to(x.device) for each in pairs)
        shares = exact(topk_weights[tokens, slots][:, None])
        rows = exact(x[tokens])
        if on_input:
            rows = (rows * shares).rounded_to(narrow)
        made = _of_expert(rows, experts, place, rounding, activations)
        made = made if on_input else made.rounded_to(narrow) * shares
        total = Bounded(value[tokens], error[tokens]) + made
        value[tokens], error[tokens] = total.value, total.error
    return Bounded(value, error)


def _of_expert(
    rows: Bounded,
    experts: Any,
    place: int,
    rounding: Rounding,
    activations: Activations,
) -> Bounded:
    matrices, act = experts.expert(place), experts.facts.activation
    narrow = rounding.between
    up_bias, down_bias = (
        None if biases is None else biases[place] for biases in (experts.gate_up_bias, experts.down_bias)
    )
    gate_up = _through(matrices.gate_up, up_bias, rows, rounding, activations).rounded_to(narrow)
    half = gate_up.value.shape[-1] // 2
    inner = bound_gated_activation(gate_up[:half], gate_up[half:], act.kind, act.alpha, act.limit).rounded_to(
        narrow
    )
    return _through(matrices.down, down_bias, inner, rounding, activations)


def _through(
    weight: Weight,
    bias: Tensor | None,
    rows: Bounded,
    rounding: Rounding,
    activations: Activations,
) -> Bounded:
    """One matrix of an expert, and its bias."""
    factors, matrix, terms = weight.input_factors, weight.dequantize(), Terms.of(weight)
    rows = rows if factors is None else rows * exact(factors)
    if not quantizes(weight, activations):
        inputs = rows.rounded_to(rounding.inputs)
        return product(inputs, matrix, bias, rounding.weights, terms=terms, steps=STEPS)
    narrow, held = rounding.between, rounding.declared
    made = [
        product(taken.rounded_to(narrow), matrix[n], None if bias is None else bias[n], held, steps=STEPS)
        for taken, n in _as_declared(rows, weight)
    ]
    return Bounded(torch.cat([each.value for each in made], -1), torch.cat([each.error for each in made], -1))


def _as_declared(rows: Bounded, weight: Weight) -> Iterator[tuple[Bounded, slice]]:
    """Inputs as declared quantizers take them, each for the outputs of a part.

    An error e may carry an input over the edge between two codes, which lie 2 (|code - input| + e) apart at
    most; where scales are found it moves these as well. Where they are stored, inputs that stay with their
    code whichever way they move are off by nothing.
    """
    scheme = weight.activations
    assert scheme is not None

    def coded(values: Tensor) -> Iterator[tuple[Tensor, slice]]:
        for made, columns in declared.quantized(values.float(), weight, "own"):
            yield made.dequantize().double(), columns

    moved = (coded(rows.value + by) for by in (0 * rows.error, rows.error, -rows.error))
    for (taken, columns), (more, _), (less, _) in zip(*moved, strict=True):
        error = 4 * rows.error + 2 * (taken - rows.value).abs()
        if not scheme.dynamic:
            error = torch.where((more == taken) & (less == taken), 0.0, error)
        yield Bounded(taken, error), columns
