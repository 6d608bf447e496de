"""Placeholders of quantized linear layers and experts in transformers' models, and LoRA on them.

transformers reads the sizes of a placeholder and moves it between devices; a qload module computes its
output.

    from peft import get_peft_model
    from qload.engines.transformers import lora_config

    model = get_peft_model(model, lora_config(r=8, target_modules=["q_proj", "v_proj"]))

peft is imported when a config is created. Options that read the weight of the layer (DoRA, and initial values
of adapters computed from it) are refused: a quantized weight has no such values.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from qload.architecture import Architecture
from qload.errors import ArgumentError, UnsupportedFormatError
from qload.experts import ExpertFacts, GatedActivation
from qload.experts.activation import ACTIVATIONS, facts_of

EXPERTS_IMPLEMENTATION = "qload"
STACKS = ("gate_up_proj", "down_proj")
UNGATED_STACKS = ("up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
EXPERT_PARAMETERS = (*STACKS, *BIASES)
ACTIVATION_CLASSES = {type(ACT2FN[name]): activation for name, activation in ACTIVATIONS.items()}
DENSE_CLASSES = ("Llama4TextExperts",)  # called with the rows of all tokens for every expert
LORA_INITS = (True, False, "gaussian", "orthogonal", "eva")  # peft's initial values that read no weight
ALL_LINEAR = "all-linear"  # peft's own linear classes


class PlaceholderLayer(nn.Module):
    """Base of placeholders: their tensors move between devices, and casts are refused.

    Parameters
    ----------
    dtype
        Of the activations, for which weights are repacked by the load.
    """

    dtype: torch.dtype
    is_tied = False  # whether another placeholder has the same weight

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.linear: nn.Module | None = None
        self.stored: nn.Parameter | None
        self.register_parameter("stored", None)

    @property
    def numel(self) -> int:
        """Number of elements of the whole layer."""
        raise NotImplementedError

    def filled(self) -> Any:
        """Return the module that computes outputs; ArgumentError before the placeholder is filled."""
        if self.linear is None:
            raise ArgumentError("layer", "a loaded layer", "an empty placeholder")
        return self.linear

    def reserve(self, nbytes: int) -> None:
        """Count as `nbytes` bytes while transformers computes a device map."""
        reserved = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.stored = nn.Parameter(reserved, requires_grad=False)

    def release(self) -> None:
        """Count as no bytes, once the device map is known."""
        self.stored = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move all tensors by `fn`; ArgumentError for a cast of the activations."""
        check_no_cast(fn, self.dtype)
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved


def check_no_cast(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Raise ArgumentError if `fn`, which moves tensors, casts activations of a `dtype`."""
    got = fn(torch.empty(0, dtype=dtype)).dtype
    if got != dtype:
        expected = f"{dtype}, the dtype of the load; for another one call load(path, dtype=...)"
        raise ArgumentError("dtype", expected, str(got))


def refuse_casts(model: Any, dtype: torch.dtype) -> None:
    """Refuse a cast of the whole `model` before any of its tensors is cast."""
    model._apply = partial(_apply_to_model, model, dtype)


def _apply_to_model(
    model: Any, dtype: torch.dtype, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> Any:
    check_no_cast(fn, dtype)
    return type(model)._apply(model, fn, recurse)


class LinearSlot(PlaceholderLayer):
    """Placeholder of a linear layer (..., K) -> (..., N), filled once transformers has loaded the rest.

    Parameters
    ----------
    in_features, out_features
        K and N of the whole layer, for any share of it.
    bias
        Parameter that transformers loads, moves and shards; the product adds it.
    dtype
        Of the activations.
    """

    _hf_quantized_needs_local_tp = True  # inputs and outputs are this rank's plain tensors
    _is_hf_initialized = True

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        super().__init__(dtype)
        self.in_features: int = in_features
        self.out_features: int = out_features
        self.device: torch.device = torch.device("meta")
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    @property
    def numel(self) -> int:
        """Number of elements of the weight."""
        return self.out_features * self.in_features

    @property
    def weight(self) -> Tensor:
        """Weight (N, K) of NaN, with the dtype, shape and device of the layer.

        On device "meta" before the placeholder is filled.
        """
        nan = torch.full((), torch.nan, dtype=self.dtype, device=self.device)
        return nan.expand(self.out_features, self.in_features)

    def fill(self, linear: nn.Module, device: torch.device) -> None:
        """Compute outputs by `linear` on `device`: a module (x, bias) -> y of this rank's share."""
        self.linear, self.device = linear, device

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N), with bias; ArgumentError before the placeholder is filled."""
        linear = self.filled()
        bias = (
            self.bias
        )  # read at each call: transformers hides it from a share of inputs, and adds it to the sum
        y: Tensor = linear(x) if bias is None else linear(x, bias)
        return y

    def extra_repr(self) -> str:
        """Sizes of the whole layer."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"


class TypedExperts(PlaceholderLayer):
    """Placeholder of the experts of a layer, within transformers' module of them.

    Parameters
    ----------
    shape
        (E, H, I) of the whole layer: experts, hidden size, and intermediate size.
    count
        Number of elements of its matrices and biases.
    dtype
        Of the activations.
    """

    def __init__(self, shape: tuple[int, int, int], count: int, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.shape: tuple[int, int, int] = shape
        self.count: int = count

    @property
    def numel(self) -> int:
        """Number of elements of the matrices and biases."""
        return self.count

    def fill(self, linear: nn.Module) -> None:
        """Compute outputs by `linear`: a module (x, topk_ids, topk_weights) -> y of this rank's share."""
        self.linear = linear

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Apply experts `topk_ids` (T, k) to x (T, H), each times its `topk_weights`: (T, H)."""
        y: Tensor = self.filled()(x, topk_ids, topk_weights.to(x.dtype))
        return y


def expert_stacks(module: nn.Module) -> tuple[str, str] | None:
    """Return the parameters of a module that are stacks of an expert's first matrix and of down; or None."""
    if "gate_proj" in module._parameters:
        return None
    for names in (STACKS, UNGATED_STACKS):
        stacks = [module._parameters.get(name) for name in names]
        if all(stack is not None and stack.ndim == 3 for stack in stacks):
            return names
    return None


def replace_experts(name: str, module: nn.Module) -> TypedExperts:
    """Replace the stacks in a module of experts, called `name` in its model, by a placeholder.

    UnsupportedFormatError for a module that calls its experts in an unknown way.
    """
    is_dispatched = is_dispatched_by_config(module)
    if not is_dispatched and type(module).__name__ not in DENSE_CLASSES:
        why = f"{type(module).__name__} does not call its experts through ALL_EXPERTS_FUNCTIONS"
        raise UnsupportedFormatError(name, why)
    shape = expert_sizes(module)
    removed = [module._parameters.pop(parameter, None) for parameter in EXPERT_PARAMETERS]
    parameters = [parameter for parameter in removed if parameter is not None]
    typed = TypedExperts(shape, sum(param.numel() for param in parameters), parameters[0].dtype)
    module.typed_experts = typed
    module._is_hf_initialized = True  # type: ignore[assignment]  # no parameter is left to initialize
    if is_dispatched:
        config: Any = copy(module.config)  # of this layer alone: another layer may have plain experts
        config._experts_implementation_internal = EXPERTS_IMPLEMENTATION
        module.config = config
    else:
        module.forward = DenseExpertsForward(module)
    return typed


def expert_sizes(module: nn.Module) -> tuple[int, int, int]:
    """Return (E, H, I) of a module of experts, whose matrices have their outputs first or last."""
    E, *sizes = module.get_parameter(STACKS[-1]).shape
    H, inner = reversed(sizes) if has_inputs_first(module) else sizes
    return E, H, inner


def has_inputs_first(module: nn.Module) -> bool:
    """Return whether the stacks of a module are (E, K, N): as its class says, else by their shapes."""
    stated = getattr(module, "is_transposed", None)
    if isinstance(stated, bool) or "gate_up_proj" not in module._parameters:
        return bool(stated)
    gate_up, down = (module.get_parameter(stack) for stack in STACKS)
    return gate_up.shape[1:] != (2 * down.shape[2], down.shape[1])


def is_dispatched_by_config(module: nn.Module) -> bool:
    """Return whether a module calls its experts by the function that its config names."""
    return hasattr(module, "_apply_gate") and hasattr(module, "config")


def resolve_facts(
    name: str, module: nn.Module, architecture: Architecture | None, given: ExpertFacts | None
) -> ExpertFacts | None:
    """Return the computation inside the experts `name`, by `module` or the config, else as `given`.

    None: it is that of the class. ArgumentError, which names the argument `facts`, if `given` contradicts.
    """
    facts = _module_facts(module) or _config_facts(module, architecture)
    if given is None or given == facts:
        return facts
    if facts is not None:
        raise ArgumentError("facts", f"None, or the facts of {name}: {facts}", str(given))
    gate = f"{type(module).__name__}._apply_gate"
    if not _has_gate_only(module) or not _computes(module, given.activation):
        raise ArgumentError("facts", f"the activation of {gate} in {name}", str(given))
    return given


def _module_facts(module: nn.Module) -> ExpertFacts | None:
    """Computation inside the experts of a module, by its class; None for a class with a gate of its own."""
    is_default = getattr(type(module), "_apply_gate", None) is _default_apply_gate
    function = getattr(module, "act_fn", None)
    is_silu = function is functional.silu
    activation = ACTIVATIONS["silu"] if is_silu else ACTIVATION_CLASSES.get(type(function))
    if activation is None or not is_default or not _has_gate_only(module):
        return None
    return ExpertFacts(activation)


def _config_facts(module: nn.Module, architecture: Architecture | None) -> ExpertFacts | None:
    """Computation inside the experts by the config; None if it is unknown, or the class computes another."""
    try:
        facts = facts_of(architecture)
    except ArgumentError:
        return None
    if type(module).__name__ in DENSE_CLASSES:
        return facts
    is_dispatched = is_dispatched_by_config(module) and _has_gate_only(module)
    return facts if is_dispatched and _computes(module, facts.activation) else None


def _has_gate_only(module: nn.Module) -> bool:
    """Return whether a gate is the only operation between the matrices of a module of experts."""
    return getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", True)


def _computes(module: Any, activation: GatedActivation) -> bool:
    """Return whether the gate of a module equals an activation on random numbers of a wide range."""
    random = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        gate, up = (torch.randn(64, 32, generator=random) * 16 for _ in range(2))
        joined, interleaved = torch.cat([gate, up], -1), torch.stack([gate, up], -1).flatten(-2)
        want = activation(gate, up)
        return any(torch.allclose(module._apply_gate(x), want) for x in (joined, interleaved))


class DenseExpertsForward:
    """Forward of Llama 4's experts, called with rows of every token for every expert, in their order."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Apply the experts to rows (E T, H), already times the routing weights -> (E T, H)."""
        typed: Any = self.module.typed_experts
        E, rows = typed.shape[0], hidden_states.shape[0]
        ids = torch.arange(E, device=hidden_states.device).repeat_interleave(rows // E)[:, None]
        y: Tensor = typed(hidden_states, ids, hidden_states.new_ones(rows, 1))
        return y


def experts_forward(
    module: nn.Module, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """Forward of experts with the implementation "qload": x (T, H), ids and weights (T, k) -> (T, H)."""
    typed: Any = module.typed_experts
    y: Tensor = typed(hidden_states, topk_ids, topk_weights)
    return y


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)


def lora_config(**options: Any) -> Any:
    """Create a `peft.LoraConfig` that supports the quantized layers of a model.

    Gradients reach adapters, inputs and biases. A quantized weight is not a parameter: adapters cannot be
    merged into it, and peft's `merge` is refused.

    Parameters
    ----------
    options
        Those of `peft.LoraConfig`.

    Raises
    ------
    ArgumentError
        If peft is not installed, or has no `_register_custom_module`; for an option that reads weights; and
        for "all-linear", for which peft finds plain layers alone.
    """
    return _with_lora_class(_import_peft().LoraConfig(**options))


def saved_lora_config(path: str | PathLike[str], **options: Any) -> Any:
    """Read the config of an adapter written by peft's `save_pretrained`, for `PeftModel.from_pretrained`.

    Parameters
    ----------
    path
        The adapter's folder, or its name on the hub.
    options
        Those of `peft.LoraConfig.from_pretrained`.

    Raises
    ------
    ArgumentError
        As in `lora_config`.
    """
    return _with_lora_class(_import_peft().LoraConfig.from_pretrained(path, **options))


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ArgumentError("peft", "the package: `pip install peft`", str(error)) from None
    return peft


def _with_lora_class(config: Any) -> Any:
    """Register the class of adapters on placeholders in a `config`; ArgumentError for unsupported options."""
    if config.use_dora:
        expected = "False: it reads weights, and these are quantized"
        raise ArgumentError("use_dora", expected, repr(config.use_dora))
    if config.init_lora_weights not in LORA_INITS:
        expected = f"one of {', '.join(map(repr, LORA_INITS))}"
        raise ArgumentError("init_lora_weights", expected, repr(config.init_lora_weights))
    if str(config.target_modules).lower() == ALL_LINEAR:
        expected = "names of layers: peft does not find quantized linear layers"
        raise ArgumentError("target_modules", expected, repr(config.target_modules))
    register: Any = getattr(config, "_register_custom_module", None)
    if register is None:
        raise ArgumentError("peft", "LoraConfig._register_custom_module", "a version without it")
    register({LinearSlot: lora_slot()})
    return config


def lora_slot() -> type[Any]:
    """Return the class of adapters on a `LinearSlot`: peft's for linear layers, without merging."""
    from peft.tuners.lora import Linear

    class LoraSlot(Linear):  # type: ignore[misc]
        """Adapter on a quantized layer."""

        def merge(self, safe_merge: bool = False, adapter_names: Any = None) -> None:
            """Raise ArgumentError: an adapter cannot be added to a quantized weight."""
            expected = "a plain weight: an adapter cannot be merged into codes, and stays separate"
            raise ArgumentError("merge", expected, "a quantized weight")

        def unmerge(self) -> None:
            """Do nothing: no adapter is merged."""

    return LoraSlot
