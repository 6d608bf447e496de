"""`awq_marlin`: AWQ layers in Marlin's order, under the parameter names of engines.

Before loading, for a rank's K inputs and N outputs, f = 32 / bits codes per word, and G groups:

    qweight  int32         (K, N/f)   input_dim 0, output_dim 1, packed_dim 1, packed_factor f
    qzeros   int32         (G, N/f)   the same attributes
    scales   params_dtype  (G, N)     input_dim 0, output_dim 1

Afterwards the same names have the tensors of the kernel. Marlin's are padded; `qzeros` is empty if all zero
points are 2**(bits - 1) and the config claims no others; `g_idx` and `g_idx_sort_indices` are empty unless
the kernel has an index of its own; `workspace` has its locks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from qload.detect import loader_from_config
from qload.errors import ArgumentError, ConfigError, CutError
from qload.formats import AWQConfig
from qload.formats.awq import BITS
from qload.kernels import MPLinearKernel, MPLinearLayerConfig, choose_mp_linear_kernel
from qload.kernels.chips import compute_capability
from qload.kernels.scalar_type import integer_type
from qload.layouts import Stored, awq
from qload.loader.exclusion import Exclusions
from qload.methods.base import (
    LinearMethodBase,
    QuantizationConfig,
    UnquantizedLinearMethod,
    check_bias,
    is_linear,
    register_quantization,
)
from qload.methods.marlin import (
    MARLIN_SUPPORTED_GROUP_SIZES,
    marlin_make_empty_g_idx,
    marlin_make_workspace,
    verify_marlin_supported,
)
from qload.methods.parameters import (
    EMPTY_WORD,
    check_loaded,
    close_weights,
    empty_parameter,
    full_name,
    register_weight,
    replace_parameter,
    restore_attrs,
)

NAME = "awq_marlin"
PARAMETERS = ("qweight", "qzeros", "scales")
MAX_LISTED_RANKS = 64  # in an error
# Engines' defaults for a config without a key, by both spellings of it.
DEFAULTS = {("bits", "w_bit"): 4, ("group_size", "q_group_size"): 128, ("zero_point",): True}


@register_quantization(NAME)
class AWQMarlinConfig(QuantizationConfig):
    """Config of AWQ's GEMM layout, multiplied in Marlin's; created without a GPU.

    `pack_factor` is the number of codes in a word and `quant_type` the type of a code. ArgumentError for an
    invalid parameter.

    Parameters
    ----------
    weight_bits
        4 or 8.
    group_size
        -1 (one group), 32, 64 or 128; a larger one for layers with as many inputs, which have one group.
    zero_point
        Whether zero points are stored; without, all are 2**(bits - 1).
    modules_to_not_convert
        Names of plain layers, or runs of whole segments of their names.
    """

    def __init__(
        self,
        weight_bits: int,
        group_size: int,
        zero_point: bool,
        modules_to_not_convert: Sequence[str] | None = None,
    ) -> None:
        if type(weight_bits) is not int or weight_bits not in BITS:
            raise ArgumentError("weight_bits", " or ".join(map(str, BITS)), str(weight_bits))
        if type(group_size) is not int:
            raise ArgumentError("group_size", "a whole number", repr(group_size))
        if type(zero_point) is not bool:
            raise ArgumentError("zero_point", "true or false", repr(zero_point))
        names = () if modules_to_not_convert is None else modules_to_not_convert
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            raise ArgumentError("modules_to_not_convert", "a list of names", repr(modules_to_not_convert))
        self.weight_bits, self.group_size, self.zero_point = weight_bits, group_size, zero_point
        self.modules_to_not_convert = list(names)
        self.pack_factor = 32 // weight_bits
        self.quant_type = integer_type(weight_bits, zero_points=zero_point)
        # A larger size is valid for layers with one group, which each layer checks.
        largest = max(MARLIN_SUPPORTED_GROUP_SIZES)
        verify_marlin_supported(self.quant_type, min(group_size, largest), has_zp=zero_point)

    def __repr__(self) -> str:
        return (
            f"AWQMarlinConfig(weight_bits={self.weight_bits}, group_size={self.group_size}, "
            f"zero_point={self.zero_point}, modules_to_not_convert={self.modules_to_not_convert})"
        )

    @classmethod
    def get_name(cls) -> str:
        """Return `awq_marlin`."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes of Marlin's kernel."""
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the capability of Ampere, for which the kernel is compiled; the CPU multiplies too."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the names of config files; AutoAWQ's own is `quant_config.json`."""
        return ["quantize_config.json", "quant_config.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Create a config from `config`, a `quantization_config` of AWQ, in either spelling of its keys.

        By default `bits` or `w_bit` is 4, `group_size` or `q_group_size` 128, and zero points are stored.
        ConfigError names a wrong key; UnsupportedFormatError for a layout other than GEMM.
        """
        if not isinstance(config, Mapping):
            raise ConfigError("config", "quantization_config", "an object", type(config).__name__)
        values = dict(config)
        if values.get("quant_method", NAME) == NAME and values.get("method") is None:
            values["quant_method"] = "awq"
        for keys, default in DEFAULTS.items():
            if all(values.get(key) is None for key in keys):
                values[keys[0]] = default
        stored = loader_from_config(values).formats[0].config
        if not isinstance(stored, AWQConfig):
            raise ConfigError("config", "quantization_config.quant_method", "awq", stored.name)
        excluded = values.get("modules_to_not_convert")
        return cls(stored.bits, stored.group_size, stored.zero_point, excluded)

    def get_quant_method(self, layer: nn.Module, prefix: str = "") -> LinearMethodBase | None:
        """Return Marlin's method for a linear layer, a plain one for an excluded layer, None for others.

        MismatchError for a fused layer with only some parts excluded; ArgumentError for an invalid `prefix`.
        """
        if not is_linear(layer):
            return None
        if not isinstance(prefix, str):
            raise ArgumentError("prefix", "a layer's name", repr(prefix))
        if Exclusions(tuple(self.modules_to_not_convert)).entry(prefix) is not None:
            return UnquantizedLinearMethod()
        return AWQMarlinLinearMethod(self)


class AWQMarlinLinearMethod(LinearMethodBase):
    """Method of an AWQ layer: repacks its words once, and multiplies by the first kernel for the layer.

    Parameters
    ----------
    quant_config
        Config of the checkpoint.
    """

    def __init__(self, quant_config: AWQMarlinConfig) -> None:
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
        """Register `qweight`, `qzeros` and `scales`, empty until they are loaded.

        CutError for a share that cuts a group or a word; ArgumentError for sizes without whole groups, and
        for a layer with such weights; NoKernelError with the reason of every kernel.
        """
        if hasattr(layer, "mp_linear_kernel"):
            name = full_name(layer, "qweight")
            raise ArgumentError(name, "a layer without weights", "a prepared layer")
        K, N = input_size_per_partition, sum(output_partition_sizes)
        factor = self.quant_config.pack_factor
        self._check_outputs(layer, output_partition_sizes, output_size)
        size = self._check_groups(layer, K, input_size)
        config = MPLinearLayerConfig(
            full_weight_shape=(input_size, output_size),
            partition_weight_shape=(K, N),
            weight_type=self.quant_config.quant_type,
            act_type=params_dtype,
            group_size=size,
            zero_points=self.quant_config.zero_point,
            zeros=Stored(),
            order="awq",
            scale_type=params_dtype,
        )
        choose_mp_linear_kernel(config)  # NoKernelError
        layer.mp_linear_config = config  # type: ignore[assignment]
        groups, whole_groups = (1, 1) if size == -1 else (K // size, input_size // size)
        words = {"packed_dim": 1, "packed_factor": factor}
        for name, shape, dtype, whole, attrs in (
            ("qweight", (K, N // factor), torch.int32, input_size, words),
            ("qzeros", (groups, N // factor), torch.int32, whole_groups, words),
            ("scales", (groups, N), params_dtype, whole_groups, {}),
        ):
            attrs = {"input_dim": 0, "output_dim": 1, "input_dim_whole": whole, **attrs}
            register_weight(layer, name, empty_parameter(shape, dtype), extra_weight_attrs, attrs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack the weight of `layer` for the kernel; a second call does nothing.

        MismatchError names a parameter that was not loaded.
        """
        if hasattr(layer, "mp_linear_kernel"):
            return
        restore_attrs(layer)
        qzeros: Tensor = layer.qzeros.data  # type: ignore[assignment]
        config: MPLinearLayerConfig = layer.mp_linear_config  # type: ignore[assignment]
        bits, packing = self.quant_config.weight_bits, awq.columns(self.quant_config.weight_bits)
        if not config.zero_points and not qzeros.is_meta and bool(qzeros.eq(EMPTY_WORD).all()):
            codes = torch.full((qzeros.shape[0], qzeros.shape[1] * 32 // bits), 2 ** (bits - 1))
            qzeros.copy_(packing.pack(codes))  # a checkpoint without zero points need not store them
        check_loaded(layer, *PARAMETERS)
        if not config.zero_points and not bool((packing.unpack(qzeros) == 2 ** (bits - 1)).all()):
            stored = integer_type(bits, zero_points=True)  # the tensors overrule the config
            config = replace(config, weight_type=stored, zero_points=True)
        device: torch.device = layer.qweight.device  # type: ignore[assignment]
        kernel_type = choose_mp_linear_kernel(config, compute_capability(device))
        kernel = kernel_type(config, "qweight", "scales", "qzeros")
        kernel.process_weights_after_loading(layer)
        for name in ("g_idx", "g_idx_sort_indices"):
            if not hasattr(layer, name):  # not set by a kernel with an index of its own
                replace_parameter(layer, name, marlin_make_empty_g_idx(device))
        if not hasattr(layer, "workspace"):
            layer.register_buffer("workspace", marlin_make_workspace(device), persistent=False)
        layer.mp_linear_kernel = kernel  # type: ignore[assignment]
        close_weights(layer, *PARAMETERS)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) -> (..., N), in the dtype of x, by the weight of `layer`; `bias` (N,).

        ShapeError for a bias of another size; ArgumentError before `process_weights_after_loading`.
        """
        kernel: MPLinearKernel | None = getattr(layer, "mp_linear_kernel", None)
        if kernel is None:
            first = "process_weights_after_loading before the first call"
            raise ArgumentError(full_name(layer, "qweight"), first, "a call")
        check_bias(layer, bias, kernel.config.partition_weight_shape[1])
        return kernel.apply_weights(layer, x, bias)

    def _check_outputs(self, layer: nn.Module, sizes: Sequence[int], whole: int) -> None:
        """Raise CutError for a part that ends inside of a word."""
        factor, end = self.quant_config.pack_factor, 0
        if not sizes or min(sizes) < 1:
            raise ArgumentError("output_partition_sizes", "sizes of at least 1", repr(sizes))
        for size in sizes:
            end += size
            if end % factor:
                reason = f"as it is (K, N/{factor})"
                raise CutError(full_name(layer, "qweight"), "N", whole, end, factor, reason)

    def _check_groups(self, layer: nn.Module, K: int, whole: int) -> int:
        """Return the group size, -1 for one group; CutError for a share that cuts a group."""
        size, name = self.quant_config.group_size, full_name(layer, "scales")
        if size in (-1, whole):
            return -1
        if size not in MARLIN_SUPPORTED_GROUP_SIZES:
            sizes = ", ".join(map(str, MARLIN_SUPPORTED_GROUP_SIZES))
            expected = f"one of {sizes}, or all {whole} inputs as one group"
            raise ArgumentError(f"{name}: group_size", expected, str(size))
        reason = f"as it is (K/{size}, N)"
        if whole % size:
            raise ArgumentError(name, f"whole groups of {size} inputs, {reason}", f"K = {whole}")
        if K % size:
            worlds = [world for world in range(2, MAX_LISTED_RANKS + 1) if whole % (world * size) == 0]
            raise CutError(name, "K", whole, K, size, reason, whole // K, worlds)
        return size
