"""A linear layer of an AWQ checkpoint, under the parameter names of the engines.

As loaded, for a rank's K inputs and N outputs, f = 32 / bits codes a word, G groups:

    qweight  int32         (K, N/f)   input_dim 0, output_dim 1, packed_dim 1, packed_factor f
    qzeros   int32         (G, N/f)   the same tags
    scales   params_dtype  (G, N)     input_dim 0, output_dim 1

Afterwards these names hold what the kernel reads. Marlin's are padded, and `qzeros` is empty where the
config says that there are none and all are 2**(bits - 1); `g_idx` and `g_idx_sort_indices` are empty unless
the kernel has an index of its own, and `workspace` holds its locks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, CutError, ShapeError
from qload.kernels import MPLinearKernel, MPLinearLayerConfig, ScalarType, choose_mp_linear_kernel
from qload.kernels.chips import compute_capability
from qload.kernels.scalar_type import integer_type
from qload.layouts import Stored, awq
from qload.methods.base import LinearMethodBase
from qload.methods.marlin import (
    MARLIN_SUPPORTED_GROUP_SIZES,
    marlin_make_empty_g_idx,
    marlin_make_workspace,
)
from qload.methods.parameters import (
    UNWRITTEN,
    blank_floats,
    blank_words,
    check_loaded,
    close_weights,
    full_name,
    register_weight,
    replace_parameter,
)
from qload.methods.tags import put_tags_back

NAMES = ("qweight", "qzeros", "scales")
MOST_RANKS = 64  # that an error offers


class AWQSettings(Protocol):
    """What the method reads of an `AWQMarlinConfig`."""

    weight_bits: int
    group_size: int
    zero_point: bool
    pack_factor: int
    quant_type: ScalarType


class AWQMarlinLinearMethod(LinearMethodBase):
    """Loads AWQ's words, repacks them once, and multiplies with the first kernel that takes the layer.

    Parameters
    ----------
    quant_config
        The `AWQMarlinConfig` of the checkpoint.
    """

    def __init__(self, quant_config: AWQSettings) -> None:
        self.quant_config = quant_config

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register `qweight`, `qzeros` and `scales`, recognisably empty until they are loaded.

        A share that cuts a group or a word is a CutError; ArgumentError for sizes that no group fits, or a
        layer that has such weights already; NoKernelError with every kernel's reason.
        """
        if hasattr(layer, "mp_linear_kernel"):
            raise ArgumentError(
                full_name(layer, "qweight"), "a layer without weights", "one that is prepared"
            )
        config, shape = self.quant_config, (input_size_per_partition, sum(output_partition_sizes))
        (K, N), words = shape, shape[1] // config.pack_factor
        self._check_outputs(layer, output_partition_sizes, output_size)
        size = self._check_groups(layer, K, input_size)
        linear = self._linear(shape, (input_size, output_size), size, params_dtype)
        choose_mp_linear_kernel(linear)  # refuses with every kernel's reason
        layer.mp_linear_config = linear  # type: ignore[assignment]
        groups, whole = (1, 1) if size == -1 else (K // size, input_size // size)
        qzeros = blank_words(groups, words)
        scales = blank_floats(groups, N, dtype=params_dtype)
        self._register(layer, "qweight", blank_words(K, words), input_size, extra_weight_attrs)
        self._register(layer, "qzeros", qzeros, whole, extra_weight_attrs)
        self._register(layer, "scales", scales, whole, extra_weight_attrs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack the weight of `layer` for the kernel; a second call does nothing.

        MismatchError names what was not loaded.
        """
        if hasattr(layer, "mp_linear_kernel"):
            return
        put_tags_back(layer)
        if not self.quant_config.zero_point:
            self._fill_middle(layer)
        check_loaded(layer, *NAMES)
        config: MPLinearLayerConfig = layer.mp_linear_config  # type: ignore[assignment]
        if not config.zero_points and not self._symmetric(layer):  # what is stored is believed
            stored = integer_type(self.quant_config.weight_bits, zero_points=True)
            config = replace(config, weight_type=stored, zero_points=True)
        device: torch.device = layer.qweight.device  # type: ignore[assignment]
        kernel = choose_mp_linear_kernel(config, compute_capability(device))(
            config, "qweight", "scales", "qzeros"
        )
        kernel.process_weights_after_loading(layer)
        for name in ("g_idx", "g_idx_sort_indices"):
            if not hasattr(layer, name):  # another kernel than Marlin's has an index under this name
                replace_parameter(layer, name, marlin_make_empty_g_idx(device))
        if not hasattr(layer, "workspace"):
            layer.register_buffer("workspace", marlin_make_workspace(device), persistent=False)
        layer.mp_linear_kernel = kernel  # type: ignore[assignment]
        close_weights(layer, *NAMES)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x (..., K) -> (..., N), in x's dtype, by the weight of `layer`; `bias` (N,).

        ShapeError for a bias of another size; ArgumentError before `process_weights_after_loading`.
        """
        kernel: MPLinearKernel | None = getattr(layer, "mp_linear_kernel", None)
        if kernel is None:
            first = "process_weights_after_loading before the first call"
            raise ArgumentError(full_name(layer, "qweight"), first, "a call")
        N = kernel.config.partition_weight_shape[1]
        if bias is not None and tuple(bias.shape) != (N,):
            raise ShapeError(full_name(layer, "bias"), f"({N},) = (N,)", tuple(bias.shape))
        return kernel.apply_weights(layer, x, bias)

    def _linear(
        self, share: tuple[int, int], whole: tuple[int, int], group_size: int, dtype: torch.dtype
    ) -> MPLinearLayerConfig:
        return MPLinearLayerConfig(
            full_weight_shape=whole,
            partition_weight_shape=share,
            weight_type=self.quant_config.quant_type,
            act_type=dtype,
            group_size=group_size,
            zero_points=self.quant_config.zero_point,
            zeros=Stored(),
            order="awq",
            scale_type=dtype,
        )

    def _register(
        self, layer: nn.Module, name: str, param: nn.Parameter, whole: int, extra: dict[str, Any]
    ) -> None:
        tags = {"input_dim": 0, "output_dim": 1, "input_dim_whole": whole}
        if name != "scales":
            tags |= {"packed_dim": 1, "packed_factor": self.quant_config.pack_factor}
        register_weight(layer, name, param, extra, tags)

    def _check_outputs(self, layer: nn.Module, sizes: Sequence[int], whole: int) -> None:
        factor = self.quant_config.pack_factor
        if not sizes or min(sizes) < 1:
            raise ArgumentError("output_partition_sizes", "sizes of at least 1", repr(sizes))
        for place in (sum(sizes[: end + 1]) for end in range(len(sizes))):
            if place % factor:
                raise CutError(
                    full_name(layer, "qweight"), "N", whole, place, factor, f"as it is (K, N/{factor})"
                )

    def _check_groups(self, layer: nn.Module, K: int, whole: int) -> int:
        """The group size, -1 where one group is all there is."""
        size = self.quant_config.group_size
        if size in (-1, whole):
            return -1
        if size not in MARLIN_SUPPORTED_GROUP_SIZES:
            sizes = ", ".join(map(str, MARLIN_SUPPORTED_GROUP_SIZES))
            known = f"one of {sizes}, or all {whole} inputs as one group"
            raise ArgumentError(f"{full_name(layer, 'scales')}: group_size", known, str(size))
        if whole % size:
            raise ArgumentError(
                full_name(layer, "scales"),
                f"whole groups of {size} inputs, as it is (K/{size}, N)",
                f"K = {whole}",
            )
        if K % size:
            lawful = [world for world in range(2, MOST_RANKS + 1) if whole % (world * size) == 0]
            why, world = f"as it is (K/{size}, N)", whole // K
            raise CutError(full_name(layer, "scales"), "K", whole, K, size, why, world, lawful)
        return size

    def _fill_middle(self, layer: nn.Module) -> None:
        """The zero points that a checkpoint need not store, where it stores none."""
        qzeros: Tensor = layer.qzeros.data  # type: ignore[assignment]
        bits = self.quant_config.weight_bits
        if not qzeros.is_meta and bool(qzeros.eq(UNWRITTEN).all()):
            codes = torch.full((qzeros.shape[0], qzeros.shape[1] * 32 // bits), 2 ** (bits - 1))
            qzeros.copy_(awq.columns(bits).pack(codes))

    def _symmetric(self, layer: nn.Module) -> bool:
        qzeros: Tensor = layer.qzeros.data  # type: ignore[assignment]
        bits = self.quant_config.weight_bits
        return bool((awq.columns(bits).unpack(qzeros) == 2 ** (bits - 1)).all())
