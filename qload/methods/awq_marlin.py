"""`awq_marlin`: what a checkpoint says of its AWQ layers, and which of its layers those are."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from qload.detect import loader_from_config
from qload.errors import ArgumentError, ConfigError
from qload.formats import AWQConfig
from qload.formats.awq import BITS
from qload.kernels.scalar_type import integer_type
from qload.loader.exclusion import Exclusions
from qload.methods.awq_marlin_linear import AWQMarlinLinearMethod
from qload.methods.base import QuantizationConfig
from qload.methods.layers import is_linear
from qload.methods.marlin import MARLIN_SUPPORTED_GROUP_SIZES, verify_marlin_supported
from qload.methods.registry import register_quantization
from qload.methods.unquantized import UnquantizedLinearMethod

NAME = "awq_marlin"
# What engines take for what a config does not say, by the key and its other spelling.
DEFAULTS = {("bits", "w_bit"): 4, ("group_size", "q_group_size"): 128, ("zero_point",): True}


@register_quantization(NAME)
class AWQMarlinConfig(QuantizationConfig):
    """AWQ's GEMM layout, multiplied in Marlin's; making one needs no GPU.

    `pack_factor` is the number of codes in a word and `quant_type` what a code means. ArgumentError for a
    parameter that is none of these.

    Parameters
    ----------
    weight_bits
        4 or 8.
    group_size
        -1 (one group), 32, 64 or 128; a larger one for layers of so many inputs, which have one group.
    zero_point
        Whether zero points are stored; without, all are 2**(bits - 1).
    modules_to_not_convert
        Names of layers left as they are, or runs of whole segments of their names.
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
        # Whether a size beyond the kernel's is that of one group for all inputs, a layer says.
        largest = max(MARLIN_SUPPORTED_GROUP_SIZES)
        verify_marlin_supported(self.quant_type, min(group_size, largest), has_zp=zero_point)

    def __repr__(self) -> str:
        return (
            f"AWQMarlinConfig(weight_bits={self.weight_bits}, group_size={self.group_size}, "
            f"zero_point={self.zero_point}, modules_to_not_convert={self.modules_to_not_convert})"
        )

    @classmethod
    def get_name(cls) -> str:
        """Its name is `awq_marlin`."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """What Marlin's kernel multiplies."""
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Ampere's, which the kernel is compiled for; the CPU multiplies too."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """AutoAWQ's own file is `quant_config.json`."""
        return ["quantize_config.json", "quant_config.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From `config`, a `quantization_config` of AWQ, in either spelling of its keys.

        Where they are not said, `bits` or `w_bit` is 4, `group_size` or `q_group_size` 128, and zero points
        are stored. ConfigError says which key is wrong; a layout other than GEMM is an
        UnsupportedFormatError.
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

    def get_quant_method(
        self, layer: nn.Module, prefix: str = ""
    ) -> AWQMarlinLinearMethod | UnquantizedLinearMethod | None:
        """Marlin's for a linear layer, a plain one for those excluded, None for what is no linear layer.

        MismatchError for a fused layer of which only some parts are excluded; ArgumentError for a `prefix`
        that is no name.
        """
        if not is_linear(layer):
            return None
        if not isinstance(prefix, str):
            raise ArgumentError("prefix", "a layer's name", repr(prefix))
        if Exclusions(tuple(self.modules_to_not_convert)).entry(prefix) is not None:
            return UnquantizedLinearMethod()
        return AWQMarlinLinearMethod(self)
