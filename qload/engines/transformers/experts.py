"""Experts of a layer inside of a model of transformers: its own module, its two stacks taken out."""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from qload.architecture import Architecture
from qload.engines.transformers.slots import ModuleSlot
from qload.errors import ArgumentError, UnsupportedFormatError
from qload.experts import ExpertFacts, GatedActivation
from qload.experts.facts import ACTIVATIONS, facts_of

NAME = "qload"
STACKS = ("gate_up_proj", "down_proj")
TAKEN = (*STACKS, "gate_up_proj_bias", "down_proj_bias")
OF_ALL_ROWS = ("Llama4TextExperts",)


class TypedExperts(ModuleSlot):
    """The typed experts of a layer, where the parameters of transformers' module stood.

    Parameters
    ----------
    shape
        (E, H, I) of the whole layer: experts, their inputs, and what lies between their matrices.
    count
        How many numbers its matrices and biases have.
    dtype
        Of the activations.
    """

    def __init__(self, shape: tuple[int, int, int], count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.shape: tuple[int, int, int] = shape
        self.count: int = count
        self.linear: nn.Module | None = None
        self.stored: nn.Parameter | None
        self.register_parameter("stored", None)

    def reserve(self, nbytes: int) -> None:
        """Stand for `nbytes` bytes while transformers decides what to put on which device."""
        held = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.stored = nn.Parameter(held, requires_grad=False)

    def release(self) -> None:
        """Stand for nothing: where the layer goes is decided."""
        self.stored = None

    def fill(self, linear: nn.Module) -> None:
        """From now on `linear` multiplies: a module (x, topk_ids, topk_weights) -> y of this rank's share."""
        self.linear = linear

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """X (T, H) through the experts `topk_ids` (T, k), each times its `topk_weights`: (T, H)."""
        if self.linear is None:
            raise ArgumentError("experts", "some that are loaded", "a slot that nothing has filled")
        y: Tensor = self.linear(x, topk_ids, topk_weights.to(x.dtype))
        return y


def are_experts(module: nn.Module) -> bool:
    """Whether a module of transformers holds the experts of a layer in two stacks of three axes."""
    held = [module._parameters.get(name) for name in STACKS]
    return all(tensor is not None and tensor.ndim == 3 for tensor in held)


def take_over(name: str, module: nn.Module) -> TypedExperts:
    """Take the stacks out of a module of experts, which stands as `name` in its model; it has a slot then.

    UnsupportedFormatError for a module that calls its experts in a way that is not known.
    """
    called = hasattr(module, "_apply_gate") and hasattr(module, "config")
    if not called and type(module).__name__ not in OF_ALL_ROWS:
        why = f"{type(module).__name__} does not call its experts through ALL_EXPERTS_FUNCTIONS"
        raise UnsupportedFormatError(name, why)
    shape = sizes(module)
    taken = [module._parameters.pop(parameter, None) for parameter in TAKEN]
    held = [each for each in taken if each is not None]
    typed = TypedExperts(shape, sum(each.numel() for each in held), held[0].dtype)
    module.typed_experts = typed
    module._is_hf_initialized = True  # type: ignore[assignment]  # there is nothing to draw numbers for
    if called:
        own: Any = copy(module.config)  # of this layer alone: another one may have plain experts
        own._experts_implementation_internal = NAME
        module.config = own
    else:
        module.forward = AllRows(module)
    return typed


def sizes(module: nn.Module) -> tuple[int, int, int]:
    """(E, H, I) of a module of experts, whose matrices have their outputs first or last."""
    gate_up, down = (module.get_parameter(stack) for stack in STACKS)
    E, H, inner = down.shape
    return (E, H, inner) if gate_up.shape[1:] == (2 * inner, H) else (E, inner, H)


def facts_in(module: nn.Module) -> ExpertFacts | None:
    """What a module of experts does between its matrices, by its config; None: it has a way of its own."""
    plain = getattr(type(module), "_apply_gate", None) is _default_apply_gate
    known = ACTIVATIONS.get(getattr(getattr(module, "config", None), "hidden_act", ""))
    if known is None and getattr(module, "act_fn", None) is functional.silu:  # which no config names
        known = ACTIVATIONS["silu"]
    return ExpertFacts(known) if plain and _is_usual(module) and known is not None else None


def _is_usual(module: nn.Module) -> bool:
    """Whether a gate is all that stands between the matrices of a module of experts."""
    return getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", True)


def settled_facts(
    name: str, module: nn.Module, architecture: Architecture | None, given: ExpertFacts | None
) -> ExpertFacts:
    """What the experts `name` do between their matrices, as `module` or the config tells, else as `given`.

    ArgumentError that names the argument `facts`, where nothing tells, or where they tell otherwise.
    """
    told = facts_in(module)
    try:
        told = told or facts_of(architecture)
    except ArgumentError as error:
        own = f"{type(module).__name__}._apply_gate"
        if given is None:
            expected = f"{error.expected}, as an argument of load or QloadConfig"
            got = f"{error.got}; {name} calls {own}, which is not known"
            raise ArgumentError("facts", expected, got) from None
        if _is_usual(module) and not _computes(module, given.activation):
            raise ArgumentError("facts", f"what {own} of {name} computes", str(given)) from None
        return given
    if given is not None and given != told:
        raise ArgumentError("facts", f"None, or {told}, as {name} has it", str(given))
    return told


def _computes(module: Any, activation: GatedActivation) -> bool:
    """Whether the gate of a module is this activation, tried on numbers far beyond usual ones."""
    draw = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        gate, up = (torch.randn(64, 32, generator=draw) * 16 for _ in range(2))
        joined, interleaved = torch.cat([gate, up], -1), torch.stack([gate, up], -1).flatten(-2)
        want = activation(gate, up)
        return any(torch.allclose(module._apply_gate(each), want) for each in (joined, interleaved))


class AllRows:
    """Experts that are called with rows of every token for every expert, in their order: Llama 4's."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """X (E T, H), already times the routing weights -> (E T, H)."""
        typed: Any = self.module.typed_experts
        E, rows = typed.shape[0], hidden_states.shape[0]
        ids = torch.arange(E, device=hidden_states.device).repeat_interleave(rows // E)[:, None]
        y: Tensor = typed(hidden_states, ids, hidden_states.new_ones(rows, 1))
        return y


def experts_forward(
    module: nn.Module, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """What transformers calls for experts "qload": X (T, H), ids and weights (T, k) -> (T, H)."""
    typed: Any = module.typed_experts
    y: Tensor = typed(hidden_states, topk_ids, topk_weights)
    return y


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
