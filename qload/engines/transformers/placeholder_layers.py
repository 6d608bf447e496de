"""What stands in a model where a linear layer stood: transformers sees its sizes, qload multiplies."""

from collections.abc import Callable
from copy import copy
from functools import partial
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from qload.architecture import Architecture
from qload.errors import ArgumentError, UnsupportedFormatError
from qload.experts import ExpertFacts, GatedActivation
from qload.experts.facts import ACTIVATIONS, facts_of


class ModuleSlot(nn.Module):
    """What both kinds of slots have in common: their weights move, and no cast reaches them.

    Attributes
    ----------
    dtype
        Of the activations, for which weights are fitted when they are loaded.
    """

    dtype: torch.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move all tensors by `fn`; ArgumentError where it means another type of activations."""
        check_move(fn, self.dtype)
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved


def check_move(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """ArgumentError where `fn`, which moves tensors of activations of a `dtype`, makes others of them."""
    got = fn(torch.empty(0, dtype=dtype)).dtype
    if got != dtype:
        expected = f"{dtype}, which the model was loaded with; load(path, dtype=...) is told another"
        raise ArgumentError("dtype", expected, str(got))


def refuse_casts(model: Any, dtype: torch.dtype) -> None:
    """Let a cast of the whole `model` be refused before any of its tensors is one of another type."""
    model._apply = partial(_apply_to_all, model, dtype)


def _apply_to_all(
    model: Any, dtype: torch.dtype, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> Any:
    check_move(fn, dtype)
    return type(model)._apply(model, fn, recurse)


class LinearSlot(ModuleSlot):
    """A layer (..., K) -> (..., N) whose weight qload loads once transformers has loaded the rest.

    Parameters
    ----------
    in_features, out_features
        K and N of the whole layer, whichever share of it this rank will have.
    bias
        The parameter that transformers loads, moves and shards as any other; the product adds it.
    dtype
        Of the activations.
    """

    _hf_quantized_needs_local_tp = True  # ranks call it with, and get from it, their own plain tensors
    _is_hf_initialized = True

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features: int = in_features
        self.out_features: int = out_features
        self.dtype = dtype
        self.device: torch.device = torch.device("meta")
        self.linear: nn.Module | None = None
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)
        self.stored: nn.Parameter | None
        self.register_parameter("stored", None)

    @property
    def weight(self) -> Tensor:
        """(N, K) for who asks a layer for the type, shape and device of its weight; its numbers are NaN.

        On device "meta" before the slot is filled.
        """
        nothing = torch.full((), torch.nan, dtype=self.dtype, device=self.device)
        return nothing.expand(self.out_features, self.in_features)

    def reserve(self, nbytes: int) -> None:
        """Stand for `nbytes` bytes while transformers decides what to put on which device."""
        held = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.stored = nn.Parameter(held, requires_grad=False)

    def release(self) -> None:
        """Stand for nothing: where the layer goes is decided."""
        self.stored = None

    def fill(self, linear: nn.Module, device: torch.device) -> None:
        """From now on `linear` multiplies, on `device`: a module (x, bias) -> y of this rank's share."""
        self.linear, self.device = linear, device

    def forward(self, x: Tensor) -> Tensor:
        """X (..., K) -> (..., N), the bias added in the product; ArgumentError before it is filled."""
        if self.linear is None:
            raise ArgumentError("layer", "one that is loaded", "a slot that nothing has filled")
        bias = self.bias  # looked up now: of a share of inputs transformers hides it, and adds it to the sum
        y: Tensor = self.linear(x) if bias is None else self.linear(x, bias)
        return y

    def extra_repr(self) -> str:
        """The whole layer's sizes."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


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


WITHOUT_WEIGHTS = (True, False, "gaussian", "orthogonal", "eva")  # peft's ways to fill an adapter
EVERY_LINEAR = "all-linear"  # of peft's own classes


def lora_config(**options: Any) -> Any:
    """A `peft.LoraConfig` that knows the layers of a model on qload.

    Gradients are those of adapters, of inputs and of biases: a quantized weight is no parameter, so that
    nothing of it can be merged either, and peft's `merge` is refused.

    Parameters
    ----------
    options
        Those of `peft.LoraConfig`.

    Raises
    ------
    ArgumentError
        Where peft is not installed, or has no `_register_custom_module`; for what needs the numbers of a
        weight; and for "all-linear", by which peft finds layers that are not quantized alone.
    """
    return _known(_peft().LoraConfig(**options))


def saved_lora_config(path: str | PathLike[str], **options: Any) -> Any:
    """The config of an adapter that peft's `save_pretrained` wrote, for `PeftModel.from_pretrained`.

    Parameters
    ----------
    path
        The adapter's folder, or its name on the hub.
    options
        Those of `peft.LoraConfig.from_pretrained`.

    Raises
    ------
    ArgumentError
        As of `lora_config`.
    """
    return _known(_peft().LoraConfig.from_pretrained(path, **options))


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ArgumentError("peft", "the package, which `pip install peft` brings", str(error)) from None
    return peft


def _known(config: Any) -> Any:
    """The `config`, which is told of slots."""
    if config.use_dora or config.init_lora_weights not in WITHOUT_WEIGHTS:
        name = "use_dora" if config.use_dora else "init_lora_weights"
        said = ", ".join(map(repr, WITHOUT_WEIGHTS))
        expected = "False: it reads weights, which are quantized" if config.use_dora else f"one of {said}"
        raise ArgumentError(name, expected, repr(getattr(config, name)))
    if str(config.target_modules).lower() == EVERY_LINEAR:
        expected = "names of layers: peft takes none that is quantized for a linear one"
        raise ArgumentError("target_modules", expected, repr(config.target_modules))
    register: Any = getattr(config, "_register_custom_module", None)
    if register is None:
        raise ArgumentError("peft", "LoraConfig._register_custom_module", "a version without it")
    register({LinearSlot: lora_slot()})
    return config


def lora_slot() -> type[Any]:
    """The class of adapters on a `LinearSlot`: peft's own for linear layers, which merges nothing."""
    from peft.tuners.lora import Linear

    class LoraSlot(Linear):  # type: ignore[misc]
        """An adapter beside a layer whose weight is quantized."""

        def merge(self, safe_merge: bool = False, adapter_names: Any = None) -> None:
            """ArgumentError: a quantized weight takes no sum."""
            raise ArgumentError("merge", "an adapter beside the layer", "a weight that is quantized")

        def unmerge(self) -> None:
            """Nothing was merged."""

    return LoraSlot
