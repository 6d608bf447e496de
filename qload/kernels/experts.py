"""The experts of a layer as a module; `qload::experts_layer`, the operator of its traced calls.

    qload::experts_layer(x (..., H), topk_ids (T, k), topk_weights (T, k), tensors, key) -> (..., H)

`qload::linear` explains the key. The operator has no gradients: a call with gradients breaks the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Self

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, checked
from qload.kernels import dtypes
from qload.kernels.chips import uncast
from qload.kernels.cuda.module import LIBRARY
from qload.kernels.declared import Activations, Maximum, merge_parts
from qload.kernels.experts_function import BIASES, STACKS, KeptExperts, check_inputs, experts, multiply

Run = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], Tensor]
NAME = "experts_layer"
_KNOWN: dict[str, Run] = {}  # by key, for as long as the process runs: graphs hold the keys


def share(facts: str, run: Run) -> str:
    """Register `run`, the product of experts, under a key of their `facts` (all but the names)."""
    key = f"experts {sha256(facts.encode()).hexdigest()[:24]}"
    _KNOWN.setdefault(key, run)
    return key


def _experts(x: Tensor, ids: Tensor, weights: Tensor, held: Sequence[Tensor], meaning: str) -> Tensor:
    if meaning not in _KNOWN:
        raise ArgumentError("meaning", "that of experts that this process has made", repr(meaning))
    return _KNOWN[meaning](x, ids, weights, held).contiguous()


def _experts_of_shapes(
    x: Tensor, ids: Tensor, weights: Tensor, held: Sequence[Tensor], meaning: str
) -> Tensor:
    return x.new_empty(x.shape)


LIBRARY.define(  # type: ignore[no-untyped-call]
    f"{NAME}(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] held, str meaning) -> Tensor"
)
LIBRARY.impl(NAME, _experts, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(f"qload::{NAME}", _experts_of_shapes, lib=LIBRARY)


def experts_layer(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, held: Sequence[Tensor], meaning: str
) -> Tensor:
    """Call the operator; see the module's docstring for its arguments."""
    y: Tensor = torch.ops.qload.experts_layer(x, topk_ids, topk_weights, list(held), meaning)
    return y


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
        self._kept = KeptExperts()
        for stack in STACKS:
            for name, tensor in getattr(weight, stack).fields().items():
                self.register_buffer(f"{stack}_{name}", tensor)
        for name in BIASES:
            self.register_buffer(name, getattr(weight, name))
        self._share()

    @property
    def typed(self) -> Any:
        """The `ExpertsWeight`, over this module's buffers."""
        if self._lies_in_buffers():
            return self._blueprint
        held = {name: self._stack(name) for name in STACKS}
        return replace(self._blueprint, **held, **{name: self._buffers[name] for name in BIASES})

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Multiply x (..., H) by the chosen experts of each token: (..., H), in the dtype of x.

        `topk_ids`: (T, k), int32 or int64, numbers of experts of the whole layer, T the tokens of x one after
        another; ArgumentError for a number of no expert. `topk_weights`: (T, k), floats. Experts of other
        ranks contribute 0.
        """
        if torch.compiler.is_compiling():
            return self._traced(x, topk_ids, topk_weights)
        return self.eagerly(x, topk_ids, topk_weights)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow a move to another device, and no cast."""
        super()._apply(uncast(fn), recurse)  # type: ignore[no-untyped-call]
        self._blueprint, self._kept = self.typed, KeptExperts()  # lets go of the tensors that it came from
        return self

    def get_extra_state(self) -> Tensor:
        """Formats, configs and facts of the buffers as text, for a state dict: uint8."""
        return torch.frombuffer(bytearray(self._meaning().encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Compare `state` with the own formats and facts; ArgumentError for a difference."""
        stored = bytes(state.tolist()).decode()
        if stored != self._meaning():
            raise ArgumentError("experts: state dict", self._meaning(), stored)

    def extra_repr(self) -> str:
        """Shape, formats, configs and facts, and how inputs are quantized."""
        E, H, inner = self._blueprint.shape
        schemes = {name: getattr(self._blueprint, name).layer.activations for name in STACKS}
        inputs = [f", inputs of {name} {scheme}" for name, scheme in schemes.items() if scheme is not None]
        said = "".join(inputs) if self.activations == "declared" else ""
        return f"experts={E}, features={H}, between={inner}, {self._meaning()}{said}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled module, and register its operator in this process."""
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
            from qload.kernels.compile_support import experts_eagerly

            y: Tensor = experts_eagerly(self, x, topk_ids, topk_weights)
            return y
        held = [getattr(self, name) for name in self._held]
        return experts_layer(x, topk_ids, topk_weights, held, self._key)

    def eagerly(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Multiply without tracing; see `forward`."""
        how = self.activations, self.maximum
        return multiply(x, topk_ids, topk_weights, self.typed, *how, self._kept)

    def _lies_in_buffers(self) -> bool:
        own = self._blueprint
        held = {f"{name}_{f}": t for name in STACKS for f, t in getattr(own, name).tensors.items()}
        held |= {name: getattr(own, name) for name in BIASES}
        return all(self._buffers[name] is tensor for name, tensor in held.items())

    def _stack(self, name: str) -> Any:
        stack = getattr(self._blueprint, name)
        return stack.holding({field: self.get_buffer(f"{name}_{field}") for field in stack.fields()})

    def _meaning(self) -> str:
        own = self._blueprint
        stacks = ", ".join(f"{stack.format} {stack.config}" for stack in (own.gate_up, own.down))
        return f"{stacks}, {own.facts}, {own.local}"


class ExpertsMeaning:
    """Product of experts with equal facts; `names`: buffers of a module, in the operator's order."""

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


def experts_module(weight: Any, activations: Activations, maximum: Maximum, dtype: torch.dtype | None) -> Any:
    """Build the module of `ExpertsWeight.get_linear`, with scales and biases in the activations' dtype."""
    if activations == "declared":
        weight = replace(weight, **{name: merge_parts(getattr(weight, name)) for name in STACKS})
    stacks = {name: dtypes.stack_for_activations(getattr(weight, name), dtype) for name in STACKS}
    biases = {name: dtypes.bias_for(getattr(weight, name), dtype) for name in BIASES}
    return Experts(replace(weight, **stacks, **biases), activations, maximum)
