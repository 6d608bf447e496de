"""What a mixed-precision linear kernel promises: say no with a reason, prepare once, multiply.

The shape of vLLM's `MPLinearKernel`, with what its config lacks: how zero points are stored, and in which
order codes lie in a word. A kernel's yes is exact: a config it accepts is multiplied right.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, KernelRefusedError, checked
from qload.kernels.scalar_type import ScalarType, scalar_types
from qload.layouts import Stored, ZeroPoints

# With zero points of AWQ or of compressed-tensors, which are the only ones that engines make a config of:
# GPTQ's, which are stored minus one, they multiply in other ways.
STORED_AS_THEY_ARE = (scalar_types.uint4, scalar_types.uint8)
PackedOrder = Literal["gptq", "awq"]


@dataclass(frozen=True)
class MPLinearLayerConfig:
    """A layer as a kernel has to know it before it sees a tensor. Shapes are (K, N), as in the engines.

    Scales of another dtype than the config says are refused when they are prepared, by every kernel.

    Attributes
    ----------
    full_weight_shape, partition_weight_shape
        (K, N) of the whole layer, and of this rank's share.
    weight_type
        What a code means, such as `scalar_types.uint4b8`.
    act_type, out_type
        Of the activations, and of what comes out; `out_type` None: `act_type`, and no kernel writes another.
    group_size
        Inputs that share a scale; -1, or all inputs and more: one group.
    zero_points
        Whether zero points are stored.
    has_g_idx
        Whether there is a group index (act order).
    zeros
        How stored zero points are meant. None where `zero_points`: as they are stored, of `uint4` and `uint8`
        without a group index, as no layer that engines say so is meant otherwise; of all else it is needed.
    order
        Whether a word's codes come one after another ("gptq", compressed-tensors) or interleaved along N
        ("awq").
    scale_type
        Of the scales; None: `act_type`, as engines make them.

    Examples
    --------
    >>> import torch
    >>> from qload import MPLinearLayerConfig, scalar_types
    >>> shape, uint4b8 = (4096, 2048), scalar_types.uint4b8
    >>> MPLinearLayerConfig(shape, shape, uint4b8, torch.float16, group_size=128, zero_points=False).groups
    32
    """

    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]
    weight_type: ScalarType
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    has_g_idx: bool = False
    out_type: torch.dtype | None = None
    zeros: ZeroPoints | None = None
    order: PackedOrder = "gptq"
    scale_type: torch.dtype | None = None

    def __post_init__(self) -> None:
        told = self.weight_type in STORED_AS_THEY_ARE and self.zero_points is True and not self.has_g_idx
        if told and self.zeros is None:
            object.__setattr__(self, "zeros", Stored())

    @property
    def is_k_partitioned(self) -> bool:
        """Whether this rank has only some of the inputs."""
        return self.partition_weight_shape[0] < self.full_weight_shape[0]

    @property
    def is_one_group(self) -> bool:
        """Whether the whole layer has one group, which every rank then holds."""
        return self.group_size == -1 or self.group_size >= self.full_weight_shape[0]

    @property
    def scale_dtype(self) -> torch.dtype:
        """What a kernel's answer is about, and the only dtype of scales it then prepares."""
        return self.act_type if self.scale_type is None else self.scale_type

    @property
    def groups(self) -> int:
        """Groups whose scales this rank holds: all of them where rows are grouped by index."""
        K = self.full_weight_shape[0] if self.has_g_idx else self.partition_weight_shape[0]
        return 1 if self.is_one_group else -(-K // self.group_size)


class MPLinearKernel(ABC):
    """Prepares a layer's parameters once, then multiplies with them.

    Parameters may lie in either orientation: the tags `input_dim`, `output_dim` and `packed_dim` say which.
    An implementer promises that its yes is exact: a config it accepts is multiplied right, and every other
    one is refused with a reason. `name` is the kernel's own.

    Parameters
    ----------
    c
        The layer; KernelRefusedError where `can_implement` says no to it.
    w_q_param_name, w_s_param_name
        Under which names a module has the codes and the scales.
    w_zp_param_name, w_gidx_param_name
        The zero points and the group index; KernelRefusedError where the config has them and no name is
        given.
    """

    name: ClassVar[str]

    @checked
    def __init__(
        self,
        c: MPLinearLayerConfig,
        w_q_param_name: str,
        w_s_param_name: str,
        w_zp_param_name: str | None = None,
        w_gidx_param_name: str | None = None,
    ) -> None:
        able, reason = self.can_implement(c)
        if not able:
            raise KernelRefusedError(type(self).__name__, reason or "")
        for asked, name, what in (
            (c.zero_points, w_zp_param_name, "zero points"),
            (c.has_g_idx, w_gidx_param_name, "a group index"),
        ):
            if asked and name is None:
                raise KernelRefusedError(
                    type(self).__name__, f"{what} in the config, and no parameter for it"
                )
        self.config = c
        self.w_q_name: str = w_q_param_name
        self.w_s_name: str = w_s_param_name
        self.w_zp_name: str | None = w_zp_param_name
        self.w_gidx_name: str | None = w_gidx_param_name

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int:
        """The lowest compute capability of a CUDA device, times 10; 0: any device."""

    @classmethod
    def gains(cls, compute_capability: int | None) -> bool:
        """Whether there is a reason to choose it; `compute_capability` None: no CUDA device."""
        return True

    @classmethod
    @abstractmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """(True, None) for a layer `c` that it multiplies right, or (False, why not)."""

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack the parameters of `layer`, under their names, into what `apply_weights` reads."""

    @abstractmethod
    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x (..., K) -> (..., N), in x's dtype, by the weight of `layer`; `bias` (N,)."""

    def _get_weight_params(self, layer: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(codes, scales, zero points or None, group index or None) of a layer."""
        zeros = self.w_zp_name if self.config.zero_points else None
        index = self.w_gidx_name if self.config.has_g_idx else None
        return (
            self._held(layer, self.w_q_name),
            self._held(layer, self.w_s_name),
            None if zeros is None else self._held(layer, zeros),
            None if index is None else self._held(layer, index),
        )

    def _held(self, layer: nn.Module, name: str) -> Tensor:
        held = getattr(layer, name, None)
        if not isinstance(held, Tensor):
            raise ArgumentError(type(self).__name__, f"a layer with a tensor {name}", type(held).__name__)
        return held

    def _transform_param(
        self, layer: nn.Module, name: str | None, fn: Callable[[Tensor | None], Tensor]
    ) -> None:
        """Replace a parameter by what `fn` makes of it, as a plain parameter without tags."""
        if name is not None:
            made = fn(getattr(layer, name, None))
            if hasattr(layer, name):
                delattr(layer, name)
            layer.register_parameter(name, nn.Parameter(made.detach(), requires_grad=False))
