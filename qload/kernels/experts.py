"""The experts of a layer as a layer of a model: plain torch, which always works.

In this order, each step in float32 (float64 for x of float64):

1. x, and where the routing weight goes on the input its product with that weight;
2. gate and up by one product, plus their bias; the activation; down, plus its bias. What goes into gate and
   up, and into down, is quantized before, where the expert declares it, by its own stored scales;
3. where the routing weight goes on the output, its product with that weight;
4. the sum over the experts of a token, in the order of their numbers, whatever the order of its ids.

One rounding follows, to the dtype of x. On a GPU both sides of a product are rounded to that dtype as well,
and its sums are in float32; a weight is what its `dequantize()` says.

All tokens that chose an expert go through it at once. Only experts that a token chose are dequantized, one
after another, in slices. The vendor may sum a row otherwise when others stand beside it: what a token gets
depends on its batch within the bound of those sums, and by nothing else. A scale that is found over all
tokens would: it is refused.

Llama 4's routing weight is part of the input that is quantized, not of the product. Its owner multiplies the
hidden states by it, and hands these to the experts, whose linear layers quantize what they get:
`Llama4TextMoe.forward` of transformers 5.23.0, as vLLM does where the router's weight goes on the input.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, DtypeError, ShapeError, checked
from qload.kernels import cuda, declared
from qload.kernels.chips import uncast
from qload.kernels.declared import REMEDY, Activations, Maximum
from qload.kernels.experts_operator import experts_layer, share
from qload.kernels.reference import WIDE, product

IDS = (torch.int32, torch.int64)
BIASES = ("gate_up_bias", "down_bias")
STACKS = ("gate_up", "down")


class Experts(nn.Module):
    """Experts as a layer: x (..., H), topk_ids (T, k) and topk_weights (T, k) -> y (..., H).

    The tensors of the experts are this module's buffers. Moving the module moves them; no dtype of a packed
    word, index or scale ever changes with it.

    Parameters
    ----------
    weight
        An `ExpertsWeight`, whose `get_linear` makes the same module.
    activations, maximum
        As `ExpertsWeight.get_linear` has them; ArgumentError where inputs cannot be quantized so.
    """

    @checked
    def __init__(self, weight: Any, activations: Activations = "declared", maximum: Maximum = None) -> None:
        super().__init__()
        check_inputs(weight, activations, maximum)
        self._blueprint = weight
        self.activations: Activations = activations
        self.maximum: Maximum = maximum
        for stack in STACKS:
            for name, tensor in getattr(weight, stack).fields().items():
                self.register_buffer(f"{stack}_{name}", tensor)
        for name in BIASES:
            self.register_buffer(name, getattr(weight, name))
        self._share()

    @property
    def typed(self) -> Any:
        """The `ExpertsWeight`, over this module's buffers."""
        held = {name: self._stack(name) for name in STACKS}
        return replace(self._blueprint, **held, **{name: self._buffers[name] for name in BIASES})

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """What the experts that each token chose make of x (..., H), in its dtype: (..., H).

        `topk_ids`: (T, k), int32 or int64, numbers of experts of the whole layer, T the tokens of x one after
        another; ArgumentError for a number of no expert. `topk_weights`: (T, k), floats. Experts of other
        ranks contribute 0.
        """
        if torch.compiler.is_compiling():
            return self._traced(x, topk_ids, topk_weights)
        return experts(x, topk_ids, topk_weights, self.typed, self.activations, self.maximum)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow a move to another device, and no cast."""
        super()._apply(uncast(fn), recurse)  # type: ignore[no-untyped-call]
        self._blueprint = self.typed  # lets go of the tensors it came from
        return self

    def get_extra_state(self) -> Tensor:
        """What the buffers mean, for a state dict: uint8, the words of formats, configs and facts."""
        return torch.frombuffer(bytearray(self._meaning().encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """ArgumentError where `state` is that of another format: the tensors of some look alike."""
        said = bytes(state.tolist()).decode()
        if said != self._meaning():
            raise ArgumentError("experts: state dict", self._meaning(), said)

    def extra_repr(self) -> str:
        """Shape, formats, configs and facts, and how inputs are quantized."""
        E, H, inner = self._blueprint.shape
        schemes = {name: getattr(self._blueprint, name).layer.activations for name in STACKS}
        inputs = [f", inputs of {name} {scheme}" for name, scheme in schemes.items() if scheme is not None]
        said = "".join(inputs) if self.activations == "declared" else ""
        return f"experts={E}, features={H}, between={inner}, {self._meaning()}{said}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Another process has to learn what the experts mean to an operator."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._share()

    def _share(self) -> None:
        self._held = tuple(name for name, tensor in self._buffers.items() if tensor is not None)
        self._key = ""
        if not callable(self.maximum):
            made = ExpertsMeaning(self._blueprint, self._held, self.activations, self.maximum)
            shapes = [(name, self.get_buffer(name).shape, self.get_buffer(name).dtype) for name in self._held]
            self._key = share(f"{self._meaning()} {made.layers} {shapes} {self.activations}", made)

    def _traced(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        wanted = torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad)
        if wanted or not self._key:
            from qload.kernels.while_traced import experts_eagerly

            y: Tensor = experts_eagerly(self, x, topk_ids, topk_weights)
            return y
        held = [getattr(self, name) for name in self._held]
        return experts_layer(x, topk_ids, topk_weights, held, self._key)

    def eagerly(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The same (tokens, H), where nothing is traced."""
        return experts(x, topk_ids, topk_weights, self.typed, self.activations, self.maximum)

    def _stack(self, name: str) -> Any:
        stack = getattr(self._blueprint, name)
        return stack.holding({field: self.get_buffer(f"{name}_{field}") for field in stack.fields()})

    def _meaning(self) -> str:
        own = self._blueprint
        stacks = ", ".join(f"{stack.format} {stack.config}" for stack in (own.gate_up, own.down))
        return f"{stacks}, {own.facts}, {own.local}"


class ExpertsMeaning:
    """How tensors of experts that are alike are multiplied: `names` of a module's buffers, in their order."""

    def __init__(self, weight: Any, names: Sequence[str], activations: Activations, maximum: Maximum) -> None:
        stacks = {name: getattr(weight, name) for name in STACKS}
        away = {name: {f: t.to("meta") for f, t in stack.fields().items()} for name, stack in stacks.items()}
        self.layers = [replace(stack.layer, name="") for stack in stacks.values()]
        held = {name: stack.holding(away[name]) for name, stack in stacks.items()}
        self._blueprint = replace(weight, **held, **dict.fromkeys(BIASES))
        self._names, self._how = names, (activations, maximum)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, held: Sequence[Tensor]) -> Tensor:
        """As `experts`, with these tensors."""
        given = dict(zip(self._names, held, strict=True))
        stacks = {
            name: stack.holding({field: given[f"{name}_{field}"] for field in stack.fields()})
            for name, stack in ((name, getattr(self._blueprint, name)) for name in STACKS)
        }
        biases = {name: given.get(name) for name in BIASES}
        return experts(x, ids, weights, replace(self._blueprint, **stacks, **biases), *self._how)


def experts_module(weight: Any, activations: Activations, maximum: Maximum) -> Any:
    """The module that `ExpertsWeight.get_linear` hands out."""
    return Experts(weight, activations, maximum)


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weight: Any,
    activations: Activations = "declared",
    maximum: Maximum = None,
) -> Tensor:
    """X (..., H) through the experts that each of its T tokens chose: (..., H), in the dtype of x.

    `topk_ids` and `topk_weights`: (T, k); `weight`: an `ExpertsWeight`; `activations` and `maximum` as its
    `get_linear` has them. DtypeError, ShapeError, and ArgumentError for ids of no expert, for tensors that
    lie on other devices, and for inputs that cannot be quantized as declared.
    """
    check(x, topk_ids, topk_weights, weight)
    quantizes = activations == "declared" and any(getattr(weight, name).layer.activations for name in STACKS)
    if not quantizes and cuda.can_multiply_experts(x, topk_weights, weight):
        return cuda.experts_linear(x, topk_ids, topk_weights, weight)
    check_inputs(weight, activations, maximum)
    wide = torch.promote_types(x.dtype, torch.float32)
    narrow = x.dtype if x.is_cuda else wide
    rows, weights = x.reshape(-1, x.shape[-1]).to(wide), topk_weights.to(wide)
    total, on_input = torch.zeros_like(rows), weight.facts.side == "input"
    pairs = chosen(topk_ids, weight.local.map.tolist())
    for expert, (tokens, slots) in zip(pairs, _on_device(list(pairs.values()), x.device), strict=True):
        taken, own = rows[tokens], weights[tokens, slots][:, None]
        made = _expert(weight, expert, taken * own if on_input else taken, activations, maximum, narrow)
        total.index_put_((tokens,), made if on_input else made * own, accumulate=True)
    return total.to(x.dtype).reshape(x.shape)


def _on_device(
    pairs: Sequence[Sequence[tuple[int, int]]], device: torch.device
) -> Sequence[tuple[Tensor, Tensor]]:
    """Tokens and slots of each expert as tensors, which cross to the device in one copy."""
    flat = torch.tensor([pair for each in pairs for pair in each], dtype=torch.int64).reshape(-1, 2)
    tokens, slots = (torch.split(half, [len(each) for each in pairs]) for half in flat.to(device).unbind(1))
    return list(zip(tokens, slots, strict=True))


def chosen(topk_ids: Tensor, places: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """The (token, slot) pairs of each expert that is here and was chosen, by its place, in rising order.

    `topk_ids`: (T, k), whose numbers index `places`: where an expert is on this rank, -1 if it is not here.
    ArgumentError for a number of no expert. One copy of the ids to the host serves both: which experts are to
    be dequantized has to be known there, so that the check of the range waits for nothing more.
    """
    pairs = [(e, token, slot) for token, row in enumerate(topk_ids.tolist()) for slot, e in enumerate(row)]
    wrong = [pair for pair in pairs if not 0 <= pair[0] < len(places)]
    if wrong:
        expert, token, slot = wrong[0]
        got = f"{expert} at ({token}, {slot})" + (f" ({len(wrong)} in all)" if wrong[1:] else "")
        raise ArgumentError("topk_ids", f"numbers of experts, 0 to {len(places) - 1}", got)
    found: dict[int, list[tuple[int, int]]] = {}
    for expert, token, slot in sorted(pairs):
        if places[expert] >= 0:
            found.setdefault(places[expert], []).append((token, slot))
    return found


def _expert(
    weight: Any, expert: int, x: Tensor, activations: Activations, maximum: Maximum, narrow: torch.dtype
) -> Tensor:
    """Rows (T, H) through one expert, which is dequantized once: (T, H)."""

    def through(stack: Any, biases: Tensor | None, rows: Tensor) -> Tensor:
        bias = None if biases is None else biases[expert]
        return product(rows, stack.expert(expert), bias, activations, maximum, narrow)

    gate_up = through(weight.gate_up, weight.gate_up_bias, x)
    return through(weight.down, weight.down_bias, weight.facts.activation(*gate_up.chunk(2, dim=-1)))


def check_inputs(weight: Any, activations: Activations, maximum: Maximum) -> None:
    """ArgumentError, on every rank alike, where inputs of experts cannot be quantized as they declare.

    One expert stands for all: what they declare is the same of each.
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
    """Dtypes, shapes and devices of what experts are called with, or an error that names the tensor."""
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
    if tensor.dtype not in dtypes:
        raise DtypeError(name, list(map(_plain, dtypes)), _plain(tensor.dtype))
    if tensor.device != device:
        raise ArgumentError(name, f"a tensor on {device}, as the experts", str(tensor.device))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
