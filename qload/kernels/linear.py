"""A linear layer with a typed weight: the module, its call, and the operator `qload::linear`.

While torch traces, records or differentiates, a call is one node, an operator on the tensors of any layer:

    qload::linear(x (..., K), tensors of the weight, bias (N,) or none, key of its signature, N) -> (..., N)

It has no gradients, whose bookkeeping costs the host as much as the call; `qload::linear_with_gradients` is
the same with them. The weight is frozen: they are those of x and bias, the former by
`qload::linear_gradient`, which has gradients itself. Quantized inputs have those of inputs that are not
(straight through).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from qload.devices.tensors import PLAIN as PLAIN_TENSORS
from qload.devices.tensors import check_writable, guard
from qload.errors import ArgumentError, RepackError, ShapeError, check_values, checked
from qload.kernel_formats import Exl2KernelWeight, GPTQMarlinWeight, StripsWeight, repack, restore, strips
from qload.kernels import declared, dtypes
from qload.kernels.chips import compute_capability, uncast
from qload.kernels.cpu import KeptRows
from qload.kernels.cuda.decode import MOST_TOKENS
from qload.kernels.cuda.module import LIBRARY
from qload.kernels.declared import Activations, Maximum
from qload.kernels.plans import (
    Plan,
    are_tensors,
    check,
    check_tensors,
    known,
    multiply,
    multiply_in_torch,
    multiply_transformed,
    signature_of,
    wants_gradients,
    with_tensors,
    without_tensors,
)
from qload.spec import Layer, Weight

log: logging.Logger = logging.getLogger("qload")

PLAIN_BIASES = (*PLAIN_TENSORS, type(None))
ANYWHERE = "CompositeExplicitAutograd"  # torch's name for: on every device, below autograd
SCHEMA = "(Tensor x, Tensor[] tensors, Tensor? bias, str key, SymInt N) -> Tensor"


class Linear(nn.Module):
    """Module (..., K) -> (..., N) with a typed weight, on buffers of its tensors.

    An EXL2 weight in the order of ExLlama's kernels, which no kernel of qload reads, is restored to EXL2.

    Moving the module moves them; no dtype of a packed word, index or scale ever changes with it.

    Parameters
    ----------
    weight
        A matrix (N, K); ArgumentError for a vector or a stack. `Weight.get_linear` makes the same module.
    bias
        (N,), else ShapeError; None: no bias.
    activations
        "declared": inputs are quantized as `weight.activations` says, where it says so, and ArgumentError
        where that cannot be done; "unquantized": they are taken as they come.
    maximum
        Of a share along K whose scale covers all inputs: what `maximum_over` makes of a process group, or
        "own": this rank's scale is found in its own inputs. ArgumentError where it is needed and None.
    dtype
        The type of the activations, to which scales that a kernel reads and `bias` are converted, as
        `Weight.get_linear` says; None: they stay as they are.

    Raises
    ------
    CastError
        Where scales, bias or weights are out of the range of that type.

    Examples
    --------
    >>> import torch
    >>> from qload import Linear, UnquantizedWeight
    >>> weight = UnquantizedWeight(weight=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> Linear(weight)(torch.tensor([1.0, 1.0]))
    tensor([3., 7.])
    >>> weight.get_linear(bias=torch.ones(2))(torch.tensor([1.0, 1.0]))
    tensor([4., 8.])
    """

    @checked
    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        activations: Activations = "declared",
        maximum: Maximum = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if len(weight.shape) != 2:
            raise ArgumentError("weight", "a matrix (N, K)", f"a weight of shape {weight.shape}")
        if bias is not None and tuple(bias.shape) != (weight.layer.N,):
            raise ShapeError("bias", f"({weight.layer.N},) = (N,)", tuple(bias.shape))
        weight = repack_for_kernels(weight)
        declared.check(weight, activations, maximum)
        weight, bias = dtypes.for_activations(weight, dtype), dtypes.bias_for(bias, dtype)
        self.maximum: Maximum = maximum
        self._call = LinearCall(weight, activations, maximum)
        self._key = self._call.key
        for name, tensor in weight.fields().items():
            self.register_buffer(name, tensor)
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    @property
    def activations(self) -> Activations:
        """Quantization of inputs, an argument of the constructor: "declared" or "unquantized"."""
        return self._call.activations

    @property
    def typed(self) -> Weight:
        """The typed weight, over this module's buffers."""
        return self._call.typed([self.get_buffer(name) for name in self._call.names])

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) -> (..., N) in x's dtype, with gradients of x and of a bias.

        `bias`: (N,), in place of the module's own.
        """
        tensors = self._buffers
        if bias is not None or "bias" not in tensors:  # an argument, or a parameter for training
            tensors = {**tensors, "bias": self._parameters.get("bias") if bias is None else bias}
        if torch.compiler.is_compiling() and self._key:
            return trace(x, tensors, self._key)
        return self._call(x, [tensors[name] for name in self._call.names], tensors["bias"])  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; for a tensor of the weight also create a new call."""
        call: LinearCall | None = self.__dict__.get("_call")
        if call is None or name not in call.names:
            super().__setattr__(name, value)
            return
        if not isinstance(value, Tensor):
            raise ArgumentError(f"{self._name}: {name}", "a tensor", type(value).__name__)
        before, tensor = self.typed, value.detach() if isinstance(value, nn.Parameter) else value
        super().__setattr__(name, tensor)
        self._call = LinearCall(before.holding({name: tensor}), self.activations, self.maximum)
        self._key = self._call.key

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Refuse another format's tensors before one of them is taken."""
        if (said := state_dict.get(f"{prefix}_extra_state")) is not None:
            self.set_extra_state(said)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow a move to another device, and no cast."""
        super()._apply(uncast(fn), recurse)  # type: ignore[no-untyped-call]
        self._call.forget()
        return self

    def get_extra_state(self) -> Tensor:
        """Meaning of the buffers, for a state dict: format and config as text in uint8."""
        said = f"{self._call.blueprint.format} {self._call.blueprint.config}"
        return torch.frombuffer(bytearray(said.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Check that `state` has this format and config; ArgumentError, as formats look alike."""
        said, own = (bytes(each.tolist()).decode() for each in (state, self.get_extra_state()))
        if said != own:
            raise ArgumentError(f"{self._name}: state dict", own, said)

    @property
    def _name(self) -> str:
        return self._call.blueprint.layer.name or "weight"

    def extra_repr(self) -> str:
        """Shape, format, config, and how inputs are quantized."""
        own = self._call.blueprint
        (N, K), scheme = own.shape, own.activations
        inputs = f", inputs {scheme}" * (scheme is not None and self.activations == "declared")
        return f"in_features={K}, out_features={N}, {own.format}, {own.config}{inputs}"


def repack_for_kernels(weight: Weight, own: Weight | None = None) -> Weight:
    """Repack a `weight` from an order without fast kernels; `own`: the weight that it replaces.

    EXL2 in the order of ExLlama's kernels becomes EXL2 as it is stored: no kernel of qload reads the former,
    and its dequantization is many times slower, and cannot be captured in a CUDA graph. Marlin's order has
    kernels for few tokens alone, and becomes strips on a CUDA device that has kernels for them.
    """
    if type(weight) is GPTQMarlinWeight:
        in_strips = type(own) is StripsWeight
        if own is None:
            in_strips = strips.are_faster(compute_capability(weight.device))
        return _repack_to_strips(weight) if in_strips else weight
    if not isinstance(weight, Exl2KernelWeight):
        return weight
    log.info("%s: %s is multiplied in the order of EXL2", weight.layer.name or "weight", weight.format)
    return restore(weight)


def _repack_to_strips(weight: GPTQMarlinWeight) -> Weight:
    """Repack a weight from Marlin's order; `weight` itself, with a note, if strips cannot have it."""
    name = weight.layer.name or "weight"
    try:
        repacked = repack(weight, "strips")
    except RepackError as error:
        note = "%s: stays in Marlin's order, and is dequantized above %d tokens: %s"
        log.info(note, name, MOST_TOKENS["marlin"], error)
        return weight
    log.info("%s: %s is multiplied in strips", name, weight.format)
    return repacked


@checked
def copy_into(linear: Linear, weight: Weight, bias: Tensor | None = None) -> None:
    """Write a weight of the same layout, and a bias, into the buffers of `linear`: graphs then read them.

    Nothing is written where anything is refused. Afterwards the layer has the bits of a fresh load.

    Parameters
    ----------
    linear
        A module that `Weight.get_linear` made.
    weight
        Of the format, config, share and shapes of the layer's own; a name has to be that of the layer where
        both have one. It may lie on another device. ArgumentError where it differs.
    bias
        (N,), in the dtype of the layer's bias, else ArgumentError; None: the layer keeps its own.

    Examples
    --------
    >>> import torch
    >>> from qload import UnquantizedWeight, copy_into
    >>> linear = UnquantizedWeight(weight=torch.ones(2, 3)).get_linear()
    >>> copy_into(linear, UnquantizedWeight(weight=torch.zeros(2, 3)))
    >>> linear(torch.ones(3))
    tensor([0., 0.])
    """
    own, name = linear.typed, linear.typed.layer.name or "weight"
    weight = repack_for_kernels(weight, own)
    for what, here, there in (
        ("format", own.format, weight.format),
        ("config", own.config, weight.config),
        ("transforms", own.layer.transforms, weight.layer.transforms),
        ("layer", _placed(own.layer, weight.layer), _placed(weight.layer, own.layer)),
        ("tensors", [*own.fields()], [*weight.fields()]),
    ):
        if here != there:
            raise ArgumentError(f"{name}: {what}", str(here), str(there))
    pairs = [(field, tensor, weight.fields()[field]) for field, tensor in own.fields().items()]
    if bias is not None:
        if linear.bias is None:
            raise ArgumentError(f"{name}: bias", "None, as the layer has none", "a tensor")
        pairs.append(("bias", linear.bias, bias))
    for field, tensor, new in pairs:
        here, there = ((tuple(each.shape), each.dtype) for each in (tensor, new))
        if here != there:
            raise ArgumentError(f"{name}: {field}", *(f"{shape}, {dtype}" for shape, dtype in (here, there)))
        check_values(f"{name}: {field}", new)
        if tensor.is_meta:
            raise ArgumentError(f"{name}: {field}", "a layer with memory to write to", "one on meta")
        check_writable(tensor, f"{name}: {field}")
    with torch.no_grad():
        for _, tensor, new in pairs:
            tensor.copy_(new)


def _placed(layer: Layer, beside: Layer) -> Layer:
    """Layer for a comparison: without its name if the other has none."""
    return layer if beside.name else replace(layer, name="")


class LinearCall:
    """Calls of one layer; its tensors belong to a module, and move with it.

    Attributes
    ----------
    blueprint
        Typed weight on the meta device.
    names
        Its fields, in the order of a call's tensors.
    signature
        Shared by all layers like this one.
    key
        Key of the signature for `qload::linear`; empty if `maximum` is a function or a layer has transforms.
    """

    def __init__(
        self, weight: Weight, activations: Activations = "declared", maximum: Maximum = None
    ) -> None:
        self.blueprint = without_tensors(weight)
        self.activations: Activations = activations
        self.maximum: Maximum = maximum
        transforms, how = weight.layer.transforms, (activations, maximum)
        self._coded = None if transforms is None else LinearCall(weight.without_transforms(), *how)
        self.signature = signature_of(weight, activations, maximum)
        self.names = self.signature.names
        self.key = "" if callable(maximum) or transforms else self.signature.key
        self._N, self._K = weight.shape
        self._notice = dtypes.Notice()
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """Construct anew: another process has to register the key."""
        return LinearCall, (self.blueprint, self.activations, self.maximum)

    def typed(self, tensors: Sequence[Tensor]) -> Weight:
        """Typed weight of `tensors`."""
        return with_tensors(self.blueprint, tensors)

    def forget(self) -> None:
        """Release the tensors of earlier calls."""
        # One attribute, as threads share it.
        self._planned: tuple[tuple[Any, ...], Callable[..., bool], Plan | None] = (), bool, None
        self._kept = KeptRows()
        if self._coded is not None:
            self._coded.forget()

    def __call__(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """(..., K) -> (..., N), in x's dtype; `tensors`: one for each of `names`.

        ArgumentError if x or `bias` is no tensor.
        """
        if type(x) not in PLAIN_TENSORS or type(bias) not in PLAIN_BIASES:
            check_tensors(self.blueprint, x, bias)
        if self._coded is not None:
            return self._multiply_transformed(x, tensors, bias)
        if self.signature.plain and is_plain_call(x, tensors[0], bias, self._N, self._K):
            return functional.linear(x, tensors[0], bias)
        if torch.compiler.is_compiling():
            if self.key:
                return linear(x, tensors, bias, self.key, self._N)
            from qload.kernels.compile_support import linear_eagerly

            y: Tensor = linear_eagerly(self, x, tensors, bias)
            return y
        if not self.key or torch._C._functorch.peek_interpreter_stack() is not None:
            return self._multiply(x, tensors, bias)
        if is_observed(x, bias):
            check(x, self.typed(tensors), bias)
            self._notice.of(self.blueprint, x, bias)
            return linear(x, tensors, bias, self.key, self._N)
        operands = tensors if bias is None else [*tensors, bias]
        seen = x.get_device(), x.dtype, [*map(Tensor.data_ptr, operands)]
        known, check_operands, plan = self._planned
        if seen != known or not check_operands(*operands):
            plan = self.signature.plan(x, bias, tensors, self._kept)
            self._planned = seen, guard(operands), plan
        made = None if plan is None else plan.multiply(x, bias, tensors)
        return self._multiply(x, tensors, bias, declined=plan is not None) if made is None else made

    def _multiply_transformed(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """Product of a layer with transforms, by a call of the layer without them."""
        transforms, coded = self.blueprint.layer.transforms, self._coded
        assert transforms is not None
        assert coded is not None
        if not torch.compiler.is_compiling():
            check(x, self.typed(tensors), bias)
        return multiply_transformed(x, transforms, bias, lambda inputs, added: coded(inputs, tensors, added))

    def _multiply(
        self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, declined: bool = False
    ) -> Tensor:
        """Product without a plan; `declined`: a plan did not take the call."""
        self._notice.of(self.blueprint, x, bias)
        how = self.activations, self.maximum, self._kept
        if declined and x.is_cpu:  # where `multiply` would ask the same plan again
            weight = self.typed(tensors)
            check(x, weight, bias)
            return multiply_in_torch(x, weight, bias, *how)
        return multiply(x, self.typed(tensors), bias, *how)


def is_plain_call(x: Tensor, matrix: Tensor, bias: Tensor | None, N: int, K: int) -> bool:
    """Return whether torch's product takes an x, a plain weight (N, K) and a bias as they are."""
    if x.dtype != matrix.dtype or x.device != matrix.device or x.ndim == 0 or x.shape[-1] != K:
        return False
    return bias is None or (bias.dtype == x.dtype and bias.ndim == 1 and bias.shape[0] == N)


def is_observed(x: Tensor, bias: Tensor | None) -> bool:
    """Return whether a call has to be one operator: for gradients, a mode, a trace, or a subclass of x."""
    return (
        type(x) not in PLAIN_TENSORS
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))
    )


def trace(x: Tensor, tensors: Mapping[str, Tensor | None], key: str) -> Tensor:
    """Product with a module's tensors, by name, while torch traces it; `key`: of its `LinearCall`.

    The guards of a compiled model, which cost time at each call, then cover these arguments alone.
    """
    from qload.kernels.compile_support import facts

    names, N, K, plain = facts(key)
    held: list[Any] = [tensors[name] for name in names]
    bias = tensors["bias"]
    if not are_tensors(x, bias):
        check_tensors(known(key).blueprint, x, bias)
    if plain and is_plain_call(x, held[0], bias, N, K):
        return functional.linear(x, held[0], bias)
    return linear(x, held, bias, key, N)


def linear(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, key: str, N: int) -> Tensor:
    """(..., K) -> (..., N) by one of the two operators."""
    ways = torch.ops.qload.linear_with_gradients, torch.ops.qload.linear
    y: Tensor = ways[0 if wants_gradients(x, bias) else 1](x, list(tensors), bias, key, N)
    return y


def _linear(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, key: str, N: int) -> Tensor:
    return known(key).multiply(x, tensors, bias)


def _linear_with_gradients(
    x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, key: str, N: int
) -> Tensor:
    """Result without a view: torch forbids writes to a view with gradients from an operator."""
    y = _linear(x, tensors, bias, key, N)
    if y._base is None:
        return y
    return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())


def _linear_shape(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, key: str, N: int) -> Tensor:
    check(x, with_tensors(known(key).blueprint, tensors), bias)
    return x.new_empty((*x.shape[:-1], N))


def _gradient(gradient: Tensor, tensors: Sequence[Tensor], key: str, K: int) -> Tensor:
    return known(key).gradient(gradient, tensors)


def _gradient_shape(gradient: Tensor, tensors: Sequence[Tensor], key: str, K: int) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], K))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, tensors, bias, ctx.key, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.K, ctx.bias_dtype = x.shape[-1], None if bias is None else bias.dtype


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    of_x, of_bias = None, None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.qload.linear_gradient(gradient, tensors, ctx.key, ctx.K)
    if ctx.needs_input_grad[2]:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0, dtype=wide).to(ctx.bias_dtype)
    return of_x, [None] * len(tensors), of_bias, None, None


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gradient, tensors, ctx.key, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.N = gradient.shape[-1]


def _backward_gradient(ctx: Any, second: Tensor) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    unquantized = signature_of(known(ctx.key).blueprint, "unquantized", None).key
    y = torch.ops.qload.linear_with_gradients(second, tensors, None, unquantized, ctx.N)
    return y, [None] * len(tensors), None, None


for _name, _run in (("linear", _linear), ("linear_with_gradients", _linear_with_gradients)):
    LIBRARY.define(_name + SCHEMA)  # type: ignore[no-untyped-call]
    LIBRARY.impl(_name, _run, ANYWHERE)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"qload::{_name}", _linear_shape, lib=LIBRARY)
LIBRARY.impl("linear", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
torch.library.register_autograd("qload::linear_with_gradients", _backward, setup_context=_save, lib=LIBRARY)
LIBRARY.define("linear_gradient(Tensor gradient, Tensor[] tensors, str key, SymInt K) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("linear_gradient", _gradient, ANYWHERE)  # type: ignore[no-untyped-call]
torch.library.register_fake("qload::linear_gradient", _gradient_shape, lib=LIBRARY)
torch.library.register_autograd(
    "qload::linear_gradient", _backward_gradient, setup_context=_save_gradient, lib=LIBRARY
)
