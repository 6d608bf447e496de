"""Product of tokens with their chosen experts: by native kernels if they support it, else in plain torch.

In this order, each step in float32 (float64 for x of float64):

1. x, and where the routing weight goes on the input its product with that weight;
2. gate and up by one product, plus their bias; the activation; down, plus its bias. What goes into gate and
   up, and into down, is quantized before, where the expert declares it, by its own stored scales;
3. where the routing weight goes on the output, its product with that weight;
4. the sum over the experts of a token, in the order of their numbers, whatever the order of its ids.

One rounding follows, to the dtype of x. A weight is what its `dequantize()` says, and sums are in float32. On
a GPU both sides of a product are rounded to the dtype of x as well. On a CPU so are, for x of bfloat16 that
wants no gradient, inputs that no declaration quantizes, and weights may be; what comes out of a product stays
float32.

All tokens that chose an expert go through it at once, and experts that no token chose are not read. How many
tokens an expert has decides in which order a kernel, or the vendor, sums a row: what a token gets depends on
its batch within the bound of those sums, and by nothing else. A scale that is found over all tokens would: it
is refused.

Llama 4's routing weight is part of the input that is quantized, not of the product. Its owner multiplies the
hidden states by it, and hands these to the experts, whose linear layers quantize what they get:
`Llama4TextMoe.forward` of transformers 5.23.0, as vLLM does where the router's weight goes on the input.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from qload.errors import ArgumentError, DtypeError, ShapeError, check_type
from qload.kernels import cpu, cuda, declared
from qload.kernels.cpu import KeptRows
from qload.kernels.declared import REMEDY, Activations, Maximum
from qload.kernels.plans import WIDE, product
from qload.spec import Weight

log: logging.Logger = logging.getLogger("qload")
Numbers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


@dataclass(frozen=True)
class RoutedTokens:
    """Pairs of a token and a local expert, sorted by expert, then by token.

    Attributes
    ----------
    places
        Place of each chosen expert on this rank.
    counts
        Number of pairs of each chosen expert.
    tokens, slots
        Position of each pair: topk_ids[token, slot] is its expert.
    """

    places: Sequence[int]
    counts: Sequence[int]
    tokens: Numbers
    slots: Numbers

    def runs(self, most: int) -> Iterator["RoutedTokens"]:
        """Yield runs of whole experts with at most `most` pairs; an expert with more has its own run."""
        first = start = stop = 0
        for at, count in enumerate(self.counts):
            if at > first and stop + count - start > most:
                yield self._part(slice(first, at), slice(start, stop))
                first, start = at, stop
            stop += count
        if self.counts:
            yield self._part(slice(first, None), slice(start, stop))

    def turns(self) -> list[Numbers]:
        """Split the pairs into runs with each token at most once, in order."""
        order = numpy.argsort(self.tokens, kind="stable")
        sorted_tokens = self.tokens[order]
        turn = numpy.empty_like(order)
        turn[order] = numpy.arange(len(order)) - numpy.searchsorted(sorted_tokens, sorted_tokens)
        return [numpy.flatnonzero(turn == one) for one in range(int(turn.max(initial=-1)) + 1)]

    def _part(self, experts: slice, pairs: slice) -> "RoutedTokens":
        own = self.places[experts], self.counts[experts]
        return RoutedTokens(*own, self.tokens[pairs], self.slots[pairs])


def routed(topk_ids: Tensor, places: Sequence[int]) -> RoutedTokens:
    """Sort the pairs of tokens and chosen local experts by expert.

    `topk_ids`: (T, k), indices into `places`: the place of each expert on this rank, or -1. ArgumentError for
    an index out of range.
    """
    ids = topk_ids.detach().cpu().numpy().astype(numpy.int64)
    _check(ids, len(places))
    flat, place = ids.reshape(-1), numpy.asarray(places, numpy.int64)
    order = numpy.argsort(flat, kind="stable")
    order = order[place[flat[order]] >= 0]
    experts = flat[order]
    starts = numpy.flatnonzero(numpy.diff(experts, prepend=-1))
    counts = numpy.diff(starts, append=len(order))
    tokens, slots = numpy.divmod(order, max(1, ids.shape[1]))
    return RoutedTokens(place[experts[starts]].tolist(), counts.tolist(), tokens, slots)


def _check(ids: Numbers, total: int) -> None:
    wrong = numpy.argwhere((ids < 0) | (ids >= total)).tolist()
    if wrong:
        token, slot = wrong[0]
        got = f"{ids[token, slot]} at ({token}, {slot})" + (f" ({len(wrong)} in all)" if wrong[1:] else "")
        raise ArgumentError("topk_ids", f"numbers of experts, 0 to {total - 1}", got)


class KeptMatrix:
    """Typed weight of one matrix of an expert, with the CPU's cached rows and plan."""

    def __init__(self, weight: Weight) -> None:
        self.weight, self.rows = weight, KeptRows()
        self._plan = cpu.plan_of(weight, self.rows)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor | None:
        """Rows (n, K) -> (n, N) in float32, by the CPU module, or None."""
        return None if self._plan is None else self._plan.multiply(rows, bias, dtype=torch.float32)


class KeptStack:
    """Cached matrices of a stack; dropped if its tensors move."""

    def __init__(self) -> None:
        self._kept: tuple[Any, dict[int, KeptMatrix]] = (), {}  # replaced as a whole: threads may share it

    def of(self, stack: Any, experts: Sequence[int]) -> list[KeptMatrix]:
        """Matrices of some `experts` of a `stack`."""
        seen = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in stack.tensors.values()]
        before, found = self._kept
        if seen != before:
            found = {}
            self._kept = seen, found
        for expert in experts:
            if expert not in found:
                found[expert] = KeptMatrix(stack.expert(expert))
        return [found[expert] for expert in experts]


@dataclass(frozen=True, eq=False)
class KeptExperts:
    """Cached matrices of a layer's experts, by the names of its stacks.

    `logged`: reasons against the grouped kernels, already in the log.
    """

    gate_up: KeptStack = field(default_factory=KeptStack)
    down: KeptStack = field(default_factory=KeptStack)
    logged: set[str] = field(default_factory=set)

    def log_slow_path(self, name: str, reason: str | None) -> None:
        """Log a reason against the grouped kernels once; not while traced."""
        if reason is None or reason in self.logged or torch.compiler.is_compiling():
            return
        self.logged.add(reason)
        log.info("%s: experts are multiplied one by one, without a grouped kernel: %s", name, reason)

    def __reduce__(self) -> tuple[Any, ...]:
        """Start a copy with empty caches: its tensors have other memory."""
        return KeptExperts, ()


@dataclass(frozen=True, eq=False)
class ExpertProducts:
    """Products of rows with the matrices of experts.

    Attributes
    ----------
    weight
        An `ExpertsWeight`.
    activations, maximum
        Those of its `get_linear`.
    narrow
        Dtype of both sides of a product outside of CPU kernels.
    rounded
        Dtype of unquantized rows before a product; None: unchanged.
    kept
        Caches of earlier calls.
    """

    weight: Any
    activations: Activations
    maximum: Maximum
    narrow: torch.dtype
    rounded: torch.dtype | None
    kept: KeptExperts

    def __call__(self, name: Literal["gate_up", "down"], run: RoutedTokens, rows: Tensor) -> Tensor:
        """Rows (P, K) of a run of experts, each times the matrix of its own: (P, N), in float32 at least."""
        stack, biases = getattr(self.weight, name), getattr(self.weight, f"{name}_bias")
        as_it_comes = self.activations == "unquantized" or stack.layer.activations is None
        if as_it_comes and self.rounded is not None:
            rows = rows.to(self.rounded)
        matrices: Sequence[KeptMatrix | None] = [None] * len(run.places)
        if rows.device.type == "cpu":
            matrices = getattr(self.kept, name).of(stack, run.places)
        parts = []
        of_each = torch.split(rows, list(run.counts))
        for expert, some, kept in zip(run.places, of_each, matrices, strict=True):
            bias = None if biases is None else biases[expert]
            made = None if kept is None or not as_it_comes else kept.multiply(some, bias)
            if made is None and kept is not None and as_it_comes:
                cpu.advise_panels(some, kept.weight)
            parts.append(self._otherwise(some, stack, expert, bias, kept) if made is None else made)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _otherwise(
        self, rows: Tensor, stack: Any, expert: int, bias: Tensor | None, kept: KeptMatrix | None
    ) -> Tensor:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        weight, of_rows = (stack.expert(expert), None) if kept is None else (kept.weight, kept.rows)
        return product(wide, weight, bias, self.activations, self.maximum, self.narrow, of_rows)


def is_capturing(x: Tensor) -> bool:
    """Return whether the current stream of the device of `x` records a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False)
class DeviceExperts:
    """The experts of a layer, multiplied without the host.

    Attributes
    ----------
    weight
        An `ExpertsWeight`.
    activations, maximum
        Those of `ExpertsWeight.get_linear`.
    narrow
        The dtype of both sides of a product.
    """

    weight: Any
    activations: Activations
    maximum: Maximum
    narrow: torch.dtype

    def multiply(self, rows: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Rows (T, H) through experts `topk_ids` (T, k) -> (T, H) in the dtype of `topk_weights` (T, k)."""
        local = self.weight.local
        unknown = ((topk_ids < 0) | (topk_ids >= local.total)).any(1, keepdim=True)
        total = torch.zeros(rows.shape, dtype=topk_weights.dtype, device=rows.device)
        total = total.masked_fill(unknown, math.nan)
        if topk_ids.numel() <= len(local):
            return self._add_pairs(total, rows, topk_ids, topk_weights)
        return self._add_experts(total, rows, topk_ids, topk_weights)

    def _add_pairs(self, total: Tensor, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        local = self.weight.local
        ids, order = ids.sort(dim=1, stable=True)
        weights = weights.gather(1, order)
        here = (ids >= local.start) & (ids < local.stop)
        places = (ids - local.start).clamp(0, len(local) - 1)
        for token in range(rows.shape[0]):
            row = slice(token, token + 1)
            for slot in range(ids.shape[1]):
                column = slice(slot, slot + 1)
                y = self._through(rows[row], places[token, column], weights[row, column])
                total[row] += y.masked_fill(~here[row, column], 0.0)
        return total

    def _add_experts(self, total: Tensor, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        local = self.weight.local
        for place in range(len(local)):
            chosen = ids == local.start + place
            routing = weights.masked_fill(~chosen, 0.0).sum(1, keepdim=True)
            y = self._through(rows, place, routing)
            total += y.masked_fill(~chosen.any(1, keepdim=True), 0.0)
        return total

    def _through(self, rows: Tensor, place: Tensor | int, routing: Tensor) -> Tensor:
        """Rows (n, H) through one expert, times the routing weights `own` (n, 1)."""
        facts = self.weight.facts
        taken = rows * routing if facts.side == "input" else rows
        between = facts.activation(*self._product("gate_up", taken, place).chunk(2, dim=-1))
        y = self._product("down", between, place)
        return y if facts.side == "input" else y * routing

    def _product(self, name: Literal["gate_up", "down"], rows: Tensor, place: Tensor | int) -> Tensor:
        stack, biases = getattr(self.weight, name), getattr(self.weight, f"{name}_bias")
        bias = None if biases is None else _entry(biases, place)
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return product(wide, _expert(stack, place), bias, self.activations, self.maximum, self.narrow)


def _expert(stack: Any, place: Tensor | int) -> Weight:
    """The typed weight (N, K) of the expert at `place`, a number or a tensor (1,) on the device."""
    if isinstance(place, int):
        weight: Weight = stack.expert(place)
        return weight
    tensors = {field: _entry(tensor, place) for field, tensor in stack.tensors.items()}
    made: Weight = stack.weight_type.unchecked(stack.config, stack.layer, tensors)
    return made


def _entry(tensor: Tensor, place: Tensor | int) -> Tensor:
    """Entry `place` of a stack (E, ...); floats of 8 bits are gathered as bytes."""
    if isinstance(place, int):
        return tensor[place]
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).index_select(0, place)[0].view(tensor.dtype)
    return tensor.index_select(0, place)[0]


IDS = (torch.int32, torch.int64)
BIASES = ("gate_up_bias", "down_bias")
STACKS = ("gate_up", "down")
BETWEEN = 64 << 20  # bytes of what goes into and comes out of the matrices of experts that are taken at once


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weight: Any,
    activations: Activations = "declared",
    maximum: Maximum = None,
) -> Tensor:
    """Multiply x (..., H), T tokens, by their chosen experts: (..., H), in the dtype of x.

    `topk_ids` and `topk_weights`: (T, k); `weight`: an `ExpertsWeight`; `activations` and `maximum` as its
    `get_linear` has them. DtypeError and ShapeError; ArgumentError for ids of no expert, for tensors on other
    devices, and for inputs that cannot be quantized as declared.
    """
    check_inputs(weight, activations, maximum)
    return multiply(x, topk_ids, topk_weights, weight, activations, maximum, KeptExperts())


def multiply(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weight: Any,
    activations: Activations,
    maximum: Maximum,
    kept: KeptExperts,
) -> Tensor:
    """Multiply as `experts`, for checked `activations` and `maximum`; `kept`: caches of earlier calls."""
    check(x, topk_ids, topk_weights, weight)
    quantizes = activations == "declared" and any(getattr(weight, name).layer.activations for name in STACKS)
    across_ranks = quantizes and callable(maximum)
    if not across_ranks and cuda.can_multiply_experts(x, topk_weights, weight, declared=quantizes):
        return cuda.experts_linear(x, topk_ids, topk_weights, weight, declared=quantizes)
    if x.is_cuda:
        reason = "the maximum of the inputs is taken over several ranks" if across_ranks else None
        reason = reason or cuda.why_no_experts(weight, x.dtype, x.device, declared=quantizes)
        kept.log_slow_path(weight.gate_up.layer.name or "experts", reason)
    wide = torch.promote_types(x.dtype, torch.float32)
    narrow = x.dtype if x.is_cuda else wide
    rows, weights = x.reshape(-1, x.shape[-1]), topk_weights.to(wide)
    if x.requires_grad and torch.is_grad_enabled():
        rows = rows.to(wide)  # in which gradients of a token are summed over its experts
    if is_capturing(x):
        on_device = DeviceExperts(weight, activations, maximum, narrow)
        return on_device.multiply(rows, topk_ids, weights).to(x.dtype).reshape(x.shape)
    rounded = torch.bfloat16 if rows.dtype == torch.bfloat16 and not x.is_cuda else None
    products = ExpertProducts(weight, activations, maximum, narrow, rounded, kept)
    total = torch.zeros(rows.shape, dtype=wide, device=x.device)
    for run in routed(topk_ids, weight.local.map.tolist()).runs(_most_pairs(weight)):
        _add(total, rows, weights, run, products)
    return total.to(x.dtype).reshape(x.shape)


def _add(total: Tensor, rows: Tensor, weights: Tensor, run: RoutedTokens, products: ExpertProducts) -> None:
    """Add the results of a run of experts for rows (T, H) to a total (T, H), in the order of experts."""
    facts = products.weight.facts
    tokens, slots = (torch.from_numpy(each).to(rows.device) for each in (run.tokens, run.slots))
    taken, own = rows[tokens], weights[tokens, slots][:, None]
    gate_up = products("gate_up", run, taken * own if facts.side == "input" else taken)
    made = products("down", run, facts.activation(*gate_up.chunk(2, dim=-1)))
    made = made if facts.side == "input" else made * own
    for turn in run.turns():
        here = torch.from_numpy(turn).to(rows.device)
        total.index_put_((tokens[here],), made[here], accumulate=True)


def _most_pairs(weight: Any) -> int:
    """Largest number of rows at once, with at most `BETWEEN` bytes of intermediate results."""
    _, H, inner = weight.shape
    most: int = BETWEEN // (torch.float32.itemsize * (2 * H + 3 * inner))
    return max(1, most)


def check_inputs(weight: Any, activations: Activations, maximum: Maximum) -> None:
    """Raise ArgumentError, on every rank, if inputs of experts cannot be quantized as declared.

    All experts of a stack have one declaration.
    """
    for name in STACKS:
        stack = getattr(weight, name)
        layer = replace(stack.layer, name=f"{stack.layer.name or 'experts'}.{name}")
        scheme = layer.activations
        if activations == "declared" and scheme is not None and scheme.covers_all_tokens:
            got = f"{scheme}: a token would get another result beside other tokens"
            raise ArgumentError(f"{layer.name}: activations", f"a scale of one token at most, {REMEDY}", got)
        held = {field: tensor[0] for field, tensor in stack.fields().items()}
        declared.check(stack.weight_type.unchecked(stack.config, layer, held), activations, maximum)


def check(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weight: Any) -> None:
    """Check dtypes, shapes and devices of the arguments; errors have the tensor's name."""
    H, name = weight.shape[1], weight.gate_up.layer.name or "experts"
    _check_tensor(f"{name}: x", x, WIDE, weight.device)
    _check_tensor(f"{name}: topk_ids", topk_ids, IDS, weight.device)
    _check_tensor(f"{name}: topk_weights", topk_weights, WIDE, weight.device)
    if x.ndim == 0 or x.shape[-1] != H:
        raise ShapeError(f"{name}: x", f"(..., {H}) = (..., H)", tuple(x.shape))
    tokens, got = x.numel() // H, tuple(topk_ids.shape)
    if len(got) != 2 or got[0] != tokens:
        raise ShapeError(f"{name}: topk_ids", f"({tokens}, k), a row for each token of x", got)
    if tuple(topk_weights.shape) != got:
        raise ShapeError(f"{name}: topk_weights", f"{got}, as topk_ids", tuple(topk_weights.shape))


def _check_tensor(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    check_type(name, tensor, Tensor)
    if tensor.dtype not in dtypes:
        raise DtypeError(name, list(map(_plain, dtypes)), _plain(tensor.dtype))
    if tensor.device != device:
        raise ArgumentError(name, f"a tensor on {device}, as the experts", str(tensor.device))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
