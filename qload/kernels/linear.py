"""A typed weight as a layer of a model."""

import logging
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, ShapeError, checked
from qload.kernel_formats import Exl2KernelWeight, restore
from qload.kernels import declared, dtypes
from qload.kernels.chips import uncast
from qload.kernels.declared import Activations, Maximum
from qload.kernels.prepared import PreparedLinear, traced
from qload.spec import Weight

log: logging.Logger = logging.getLogger("qload")


class Linear(nn.Module):
    """A layer (..., K) -> (..., N) with a typed weight, whose tensors are this module's buffers.

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
        weight = in_multiplied_order(weight)
        declared.check(weight, activations, maximum)
        weight, bias = dtypes.for_activations(weight, dtype), dtypes.bias_for(bias, dtype)
        self.maximum: Maximum = maximum
        self._call = PreparedLinear(weight, activations, maximum)
        self._meaning = self._call.meaning
        for name, tensor in weight.fields().items():
            self.register_buffer(name, tensor)
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    @property
    def activations(self) -> Activations:
        """Whether inputs are quantized where the weight declares it, as the module was made."""
        return self._call.activations

    @property
    def typed(self) -> Weight:
        """The typed weight, over this module's buffers."""
        return self._call.typed([self.get_buffer(name) for name in self._call.names])

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x (..., K) -> (..., N), in x's dtype; gradients are those of x and of a bias.

        `bias`: (N,), another one than the module's own.
        """
        held = self._buffers
        if bias is not None or "bias" not in held:  # another one; or it was made a parameter, to be trained
            held = {**held, "bias": self._parameters.get("bias") if bias is None else bias}
        if torch.compiler.is_compiling() and self._meaning:
            return traced(x, held, self._meaning)
        return self._call(x, [held[name] for name in self._call.names], held["bias"])  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        """A tensor in the place of another: an index of other values may change what the config says."""
        call: PreparedLinear | None = self.__dict__.get("_call")
        if call is None or name not in call.names:
            super().__setattr__(name, value)
            return
        if not isinstance(value, Tensor):
            raise ArgumentError(f"{self._name}: {name}", "a tensor", type(value).__name__)
        before, held = self.typed, value.detach() if isinstance(value, nn.Parameter) else value
        super().__setattr__(name, held)
        self._call = PreparedLinear(before.holding({name: held}), self.activations, self.maximum)
        self._meaning = self._call.meaning

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
        """What the buffers mean, for a state dict: uint8, the words of format and config."""
        said = f"{self._call.blueprint.format} {self._call.blueprint.config}"
        return torch.frombuffer(bytearray(said.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """ArgumentError where `state` is that of another format: the tensors of some look alike."""
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


def in_multiplied_order(weight: Weight) -> Weight:
    """Return a `weight` in an order that is multiplied at full speed.

    EXL2 in the order of ExLlama's kernels becomes EXL2 as it is stored: no kernel of qload reads the former,
    to dequantize it takes many times as long, and no CUDA graph can capture that.
    """
    if not isinstance(weight, Exl2KernelWeight):
        return weight
    log.info("%s: %s is multiplied in the order of EXL2", weight.layer.name or "weight", weight.format)
    return restore(weight)


def linear_of(
    weight: Weight,
    bias: Tensor | None,
    activations: Activations,
    maximum: Maximum,
    dtype: torch.dtype | None = None,
) -> Any:
    """The module that `Weight.get_linear` hands out."""
    return Linear(weight, bias, activations, maximum, dtype)
