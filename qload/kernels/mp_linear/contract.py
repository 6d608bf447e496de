"""Interface of a mixed-precision linear kernel: refuse with a reason, prepare once, multiply.

The form of vLLM's `MPLinearKernel`. The config adds the storage of zero points and the order of codes in a
word. A kernel's acceptance is exact: it multiplies every accepted config right.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, KernelRefusedError, checked
from qload.formats.awq import BITS as AWQ_BITS
from qload.kernels.scalar_type import ScalarType, scalar_types
from qload.layouts import Stored, ZeroPoints

# Codes with zero points of AWQ or compressed-tensors, stored as they are. GPTQ's are stored minus one, and
# engines create no config of them.
STORED_AS_THEY_ARE = (scalar_types.uint4, scalar_types.uint8)
PackedOrder = Literal["gptq", "awq"]


@dataclass(frozen=True)
class MPLinearLayerConfig:
    """Description of a layer for the choice of a kernel. Shapes are (K, N), as in engines.

    Every kernel refuses scales of another dtype when it prepares them.

    Attributes
    ----------
    full_weight_shape, partition_weight_shape
        (K, N) of the whole layer, and of this rank's share.
    weight_type
        Type of a code, such as `scalar_types.uint4b8`.
    act_type, out_type
        Of the activations, and of the output; `out_type` None: `act_type`, as no kernel writes another.
    group_size
        Inputs that share a scale; -1, or at least all inputs: one group.
    zero_points
        Whether zero points are stored.
    has_g_idx
        Whether there is a group index (act order).
    zeros
        Storage of zero points. None with `zero_points`: stored as they are, for `uint4` and `uint8` without a
        group index, as in all such layers of engines; required for all others.
    order
        Codes of a word in order ("gptq", also compressed-tensors), or interleaved along N ("awq").
    scale_type
        Of the scales; None: `act_type`, as in engines.

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
        is_plain = self.weight_type in STORED_AS_THEY_ARE and self.zero_points is True and not self.has_g_idx
        if is_plain and self.zeros is None:
            object.__setattr__(self, "zeros", Stored())

    @property
    def is_k_partitioned(self) -> bool:
        """Whether this rank has only some of the inputs."""
        return self.partition_weight_shape[0] < self.full_weight_shape[0]

    @property
    def is_one_group(self) -> bool:
        """Whether the whole layer has one group, which is on every rank."""
        return self.group_size == -1 or self.group_size >= self.full_weight_shape[0]

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales, checked when they are prepared."""
        return self.act_type if self.scale_type is None else self.scale_type

    @property
    def groups(self) -> int:
        """Groups with scales on this rank: all groups of a layer with a group index."""
        K = self.full_weight_shape[0] if self.has_g_idx else self.partition_weight_shape[0]
        return 1 if self.is_one_group else -(-K // self.group_size)


class MPLinearKernel(ABC):
    """Prepares a layer's parameters once, then multiplies by them.

    Parameters may be transposed: the attributes `input_dim`, `output_dim` and `packed_dim` describe them. An
    implementer promises to multiply every accepted config right, and to refuse every other with a reason.
    `name` is the kernel's own.

    Parameters
    ----------
    c
        The layer; KernelRefusedError if `can_implement` refuses it.
    w_q_param_name, w_s_param_name
        A module's names of codes and scales.
    w_zp_param_name, w_gidx_param_name
        Names of zero points and group index; KernelRefusedError if the config has them and the name is
        missing.
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
        for is_needed, name, noun in (
            (c.zero_points, w_zp_param_name, "zero points"),
            (c.has_g_idx, w_gidx_param_name, "a group index"),
        ):
            if is_needed and name is None:
                reason = f"{noun} in the config, and no parameter for it"
                raise KernelRefusedError(type(self).__name__, reason)
        self.config = c
        self.w_q_name: str = w_q_param_name
        self.w_s_name: str = w_s_param_name
        self.w_zp_name: str | None = w_zp_param_name
        self.w_gidx_name: str | None = w_gidx_param_name

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int:
        """Return the lowest compute capability of a CUDA device, times 10; 0: any device."""

    @classmethod
    def gains(cls, compute_capability: int | None) -> bool:
        """Return whether the kernel is worth choosing; `compute_capability` None: no CUDA device."""
        return True

    @classmethod
    @abstractmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Return (True, None) for a supported layer `c`, or (False, reason)."""

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack the parameters of `layer`, under their names, for `apply_weights`."""

    @abstractmethod
    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) -> (..., N), in the dtype of x, by the weight of `layer`; `bias` (N,)."""

    def _get_weight_params(self, layer: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return (codes, scales, zero points or None, group index or None) of a layer."""
        zeros = self.w_zp_name if self.config.zero_points else None
        index = self.w_gidx_name if self.config.has_g_idx else None
        return (
            self._tensor_of(layer, self.w_q_name),
            self._tensor_of(layer, self.w_s_name),
            None if zeros is None else self._tensor_of(layer, zeros),
            None if index is None else self._tensor_of(layer, index),
        )

    def _tensor_of(self, layer: nn.Module, name: str) -> Tensor:
        tensor = getattr(layer, name, None)
        if not isinstance(tensor, Tensor):
            raise ArgumentError(type(self).__name__, f"a layer with a tensor {name}", type(tensor).__name__)
        return tensor

    def _transform_param(
        self, layer: nn.Module, name: str | None, fn: Callable[[Tensor | None], Tensor]
    ) -> None:
        """Replace a parameter by the result of `fn`, as a plain parameter without attributes."""
        if name is not None:
            values = fn(getattr(layer, name, None))
            if hasattr(layer, name):
                delattr(layer, name)
            layer.register_parameter(name, nn.Parameter(values.detach(), requires_grad=False))


def refusal(
    c: MPLinearLayerConfig,
    bits: Sequence[int],
    groups: Sequence[int] | None,
    act_types: Sequence[torch.dtype],
) -> str | None:
    """Return the first reason to refuse a config, or None. `groups` None: of any size."""
    return malformed(c) or next(_refusals(c, bits, groups, act_types), None)


def missing_rows(c: MPLinearLayerConfig) -> str | None:
    """Return the reason to refuse a share of an act order, for a kernel that counts groups by their size."""
    if not (c.has_g_idx and c.is_k_partitioned):
        return None
    rows, all_rows = c.partition_weight_shape[0], c.full_weight_shape[0]
    return f"act order needs all rows of every group, and this rank has {rows} of {all_rows}"


def malformed(c: Any) -> str | None:
    """Return the first attribute of a config with a wrong type, in words, or None."""
    if not isinstance(c, MPLinearLayerConfig):
        return f"the config has to be an MPLinearLayerConfig, got {c!r}"
    dtype = "a torch.dtype"
    checks: list[tuple[str, bool, str]] = [
        ("full_weight_shape", _is_shape(c.full_weight_shape), "(K, N)"),
        ("partition_weight_shape", _is_shape(c.partition_weight_shape), "(K, N)"),
        ("weight_type", isinstance(c.weight_type, ScalarType), "a ScalarType"),
        ("act_type", isinstance(c.act_type, torch.dtype), dtype),
        ("out_type", isinstance(c.out_type, torch.dtype | None), f"{dtype} or None"),
        ("scale_type", isinstance(c.scale_type, torch.dtype | None), f"{dtype} or None"),
        ("group_size", type(c.group_size) is int, "a whole number"),
        ("zero_points", type(c.zero_points) is bool, "true or false"),
        ("has_g_idx", type(c.has_g_idx) is bool, "true or false"),
        ("zeros", isinstance(c.zeros, ZeroPoints | None), "Stored(), StoredMinusOne() or None"),
        ("order", c.order in get_args(PackedOrder), " or ".join(map(repr, get_args(PackedOrder)))),
    ]
    wrong = ((name, expected) for name, is_valid, expected in checks if not is_valid)
    return next((f"{name} has to be {expected}, got {getattr(c, name)!r}" for name, expected in wrong), None)


def _is_shape(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(type(size) is int for size in value)


def _refusals(
    c: MPLinearLayerConfig,
    bits: Sequence[int],
    groups: Sequence[int] | None,
    act_types: Sequence[torch.dtype],
) -> Iterator[str]:
    (K, N), (full_K, full_N), code = c.partition_weight_shape, c.full_weight_shape, c.weight_type
    if min(K, N) < 1 or full_K < K or full_N < N:
        yield f"a share (K, N) = ({K}, {N}) of ({full_K}, {full_N}) is none"
    if not code.is_integer() or code.signed or code.size_bits not in bits:
        yield f"reads unsigned codes of {listed(bits)} bits, got {code}"
        return  # the checks below assume such codes
    if not 0 <= code.bias < 2**code.size_bits:
        yield f"a bias is a code, 0 <= bias < {2**code.size_bits}, got {code.bias}"
    if c.act_type not in act_types:
        yield f"multiplies {listed(act_types)}, got {c.act_type}".replace("torch.", "")
    if c.out_type not in (None, c.act_type):
        yield f"writes the dtype it reads, {c.act_type}, got {c.out_type}".replace("torch.", "")
    if c.zero_points and code.has_bias():
        yield f"{code} has a bias already, and the config zero points too"
    if not c.zero_points and not code.has_bias():
        yield f"{code} has no bias, and the config no zero points: nothing says what a code means"
    if c.zero_points and c.zeros is None:
        yield "zero_points is true and `zeros` is not set: Stored() or StoredMinusOne(), nothing tells which"
    if c.group_size < 1 and c.group_size != -1:
        yield f"a group size is -1 or at least 1, got {c.group_size}"
        return
    if groups is not None and c.groups > 1 and c.group_size not in groups:
        yield f"reads groups of {listed([g for g in groups if g > 0])} or one group, got {c.group_size}"
    if c.is_k_partitioned and not c.has_g_idx and not c.is_one_group and K % c.group_size:
        yield f"a cut of K = {full_K} at multiples of {K} falls inside groups of {c.group_size}"
    if c.order == "awq" and code.size_bits not in AWQ_BITS:
        yield f"AWQ's order is one of {listed(AWQ_BITS)} bits, got {code.size_bits}"
    codes = 32 if code.size_bits == 3 else 32 // code.size_bits  # of whole words
    for dim, size in zip(("K", "N"), c.partition_weight_shape, strict=True):
        if size % codes:
            yield f"needs K and N in multiples of {codes}, the codes of whole words; got {dim} = {size}"


def listed(values: Sequence[object]) -> str:
    """Return values as "a, b or c"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last
