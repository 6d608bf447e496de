"""Quantization schemes of compressed-tensors: of weights with their format, and of inputs."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from qload import configs
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats import (
    CTMXFP4Weight,
    CTNVFP4Weight,
    Fp8Config,
    Fp8Weight,
    Marlin24Config,
    Marlin24Weight,
    MXFP4Config,
    MXFP8Config,
    MXFP8Weight,
    NVFP4Config,
)
from qload.formats.compressed_tensors.integers import CTIntConfig, CTIntWeight
from qload.formats.compressed_tensors.packed import CTPackConfig, CTPackWeight
from qload.formats.compressed_tensors.packed_tensor import CTPackTensorConfig, CTPackTensorWeight
from qload.loader import ConfiguredFormat
from qload.spec import ActivationScheme, LayerClaims

# `dynamic` -> name of the stored scale; "local": the scale of the tensor, applied with dynamic group scales.
STORED_SCALES: Mapping[bool | str, str | None] = {
    "local": "input_global_scale",
    False: "input_scale",
    True: None,
}
ZERO_POINT = "input_zero_point"
ScaleType = Literal["float32", "e4m3", "e8m0"]
SCALE_TYPES: Mapping[str | None, ScaleType] = {
    "torch.float8_e4m3fn": "e4m3",
    "torch.uint8": "e8m0",
}
MX_GROUP_SIZE = 32  # inputs with one power of two
GROUPED_STRATEGIES = ("group", "tensor_group")


class _Activations(configs.Entry):
    """Declared quantization of inputs, with the defaults of compressed-tensors."""

    num_bits: Annotated[int, Field(ge=1, le=64)] = 8
    type: Literal["int", "float"] = "int"
    dynamic: bool | Literal["local"] | None = False
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: str | None = None

    @property
    def shared_by(self) -> str:
        """Strategy: which inputs share a scale; inferred from the group size as by compressed-tensors."""
        inferred = "tensor" if self.group_size is None else "group" if self.group_size > 0 else "channel"
        return self.strategy or inferred


def activation_scheme(
    source: configs.FoundConfig, key: str, stated: Mapping[str, Any] | None, weights: str | None
) -> ActivationScheme | None:
    """Read the activation scheme under a key of the config; None without one, ConfigError if malformed.

    `weights`: format of the group's weights; it implies the type of scales in versions that do not state it.
    """
    if not stated:
        return None
    section = configs.FoundConfig(source.file, source.key(key), stated)
    inputs = configs.validate(_Activations, section)
    dynamic, grouped = inputs.dynamic or False, inputs.shared_by in GROUPED_STRATEGIES
    if grouped and (inputs.group_size or 0) < 1:
        raise source.error(f"{key}.group_size", "at least 1", configs.value_text(inputs.group_size))
    scale_type: ScaleType = SCALE_TYPES.get(inputs.scale_dtype, "float32")
    is_mx = inputs.group_size == MX_GROUP_SIZE and (weights or "").startswith("mxfp")
    if inputs.scale_dtype is None and (dynamic == "local" or is_mx):
        scale_type = "e4m3" if dynamic == "local" else "e8m0"
    return ActivationScheme(
        type=inputs.type,
        bits=inputs.num_bits,
        dynamic=dynamic,
        strategy=inputs.shared_by,
        group_size=inputs.group_size,
        symmetric=inputs.symmetric,
        scale=STORED_SCALES[dynamic],
        zero_point=None if dynamic or inputs.symmetric else ZERO_POINT,
        scale_type=scale_type if dynamic else "float32",
    )


# Format -> its number types, its bits, and its strategies of sharing scales.
Strategy = Literal["tensor", "channel", "group", "block", "tensor_group"]
ALL_STRATEGIES = ("tensor", "channel", "group", "block")
CT_FORMATS: dict[str, tuple[tuple[str, ...], range, tuple[str, ...]]] = {
    "pack-quantized": (("int",), range(2, 9), ("tensor", "channel", "group")),
    "int-quantized": (("int",), range(2, 9), ALL_STRATEGIES),
    "float-quantized": (("float",), range(8, 9), ALL_STRATEGIES),
    "naive-quantized": (("int", "float"), range(2, 9), ALL_STRATEGIES),
    "marlin-24": (("int",), range(4, 9, 4), ("channel", "group")),
    "nvfp4-pack-quantized": (("float",), range(4, 5), ("tensor_group",)),
    "mxfp4-pack-quantized": (("float",), range(4, 5), ("group",)),
    "mxfp8-quantized": (("float",), range(8, 9), ("group",)),
}


class Scheme(configs.Entry):
    """Quantization scheme of the weights of a group."""

    num_bits: int
    type: Literal["int", "float"] = "int"
    strategy: Strategy | None = None
    group_size: Annotated[int, Field(ge=-1)] | None = None
    block_structure: list[Annotated[int, Field(ge=1)]] | str | None = None
    symmetric: bool = True
    actorder: Literal["group", "weight", "dynamic", "static"] | bool | None = None

    def claims(self, source: str) -> LayerClaims:
        """Claims about each layer of the scheme; `source`: path of the scheme in the config."""
        ordered = self.actorder in ("group", "dynamic", True)
        act_order = ordered if "actorder" in self.model_fields_set else None
        return LayerClaims(self.num_bits, self.rows_of_a_group, self.symmetric, act_order, source)

    @property
    def per(self) -> str:
        """Strategy: which weights share a scale; inferred from the group size if not stated."""
        default = "tensor" if self.group_size is None else "group" if self.group_size > 0 else "channel"
        return self.strategy or default

    @property
    def rows_of_a_group(self) -> int | None:
        """Inputs per scale; -1: all inputs; None without groups."""
        if self.per in GROUPED_STRATEGIES:
            return self.group_size
        return -1 if self.per == "channel" else None


def weight_format(
    source: configs.FoundConfig,
    key: Callable[[str], str],
    stated: str,
    scheme: Scheme,
    *,
    static: bool,
    dense: bool | None,
) -> ConfiguredFormat:
    """Format of a scheme's weights.

    `key`: path of a setting in the config, by its name, or of the format, by "". `static`: activations have
    stored scales. `dense`: the version packs codes as a bit stream; None if unknown.
    """
    if stated not in CT_FORMATS:
        raise UnsupportedFormatError(
            f"compressed-tensors ({stated:.40})",
            f"{source.key(key(''))} of {source.file} is not supported",
            (*CT_FORMATS,),
        )
    block, size = _checked_block(source, key, stated, scheme), scheme.rows_of_a_group or -1
    symmetric, bits = scheme.symmetric, scheme.num_bits
    if stated == "nvfp4-pack-quantized":
        return ConfiguredFormat(CTNVFP4Weight, NVFP4Config())
    if stated == "mxfp4-pack-quantized":
        return ConfiguredFormat(CTMXFP4Weight, MXFP4Config())
    if stated == "mxfp8-quantized":
        return ConfiguredFormat(MXFP8Weight, MXFP8Config())
    if stated == "marlin-24":
        return ConfiguredFormat(Marlin24Weight, Marlin24Config(size, bits, compressed=True))
    if stated == "pack-quantized" and scheme.per == "tensor":
        return ConfiguredFormat(CTPackTensorWeight, CTPackTensorConfig(bits, symmetric, dense))
    if stated == "pack-quantized":
        act_order = scheme.actorder in ("group", "dynamic", True)
        return ConfiguredFormat(CTPackWeight, CTPackConfig(bits, size, symmetric, act_order, dense))
    if scheme.type == "int":
        return ConfiguredFormat(CTIntWeight, CTIntConfig(block, bits, symmetric, static))
    inputs = True if static else None
    if scheme.per in ("tensor", "channel"):
        return ConfiguredFormat(
            Fp8Weight, Fp8Config("tensor" if scheme.per == "tensor" else "channel", input_scale=inputs)
        )
    return ConfiguredFormat(Fp8Weight, Fp8Config("block", block, input_scale=inputs))


def _checked_block(
    source: configs.FoundConfig, key: Callable[[str], str], stated: str, scheme: Scheme
) -> tuple[int, int] | None:
    """(outputs, inputs) per scale; None for one scale; ConfigError for a scheme unknown to the format."""
    types, bits, strategies = CT_FORMATS[stated]
    bits = range(8, 9) if scheme.type == "float" and stated == "naive-quantized" else bits

    def wrong(name: str, expected: str, got: Any) -> ConfigError:
        return source.error(key(name), f"{expected} in {stated}", configs.value_text(got))

    if scheme.type not in types:
        raise wrong("type", " or ".join(types), scheme.type)
    if scheme.num_bits not in bits:
        raise wrong("num_bits", " or ".join(map(str, bits)), scheme.num_bits)
    if scheme.per not in strategies:
        raise wrong("strategy", " or ".join(strategies), scheme.per)
    if not scheme.symmetric and (scheme.type == "float" or stated == "marlin-24"):
        raise wrong("symmetric", "true", False)
    if scheme.per in ("group", "tensor_group"):
        sizes = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32, "mxfp8-quantized": 32}
        if (scheme.group_size or 0) < 1 or sizes.get(stated, scheme.group_size) != scheme.group_size:
            raise wrong("group_size", str(sizes.get(stated, "at least 1")), scheme.group_size)
        return 1, scheme.group_size or 1
    if scheme.per == "block":
        stored = scheme.block_structure or ()
        block = [str(part) for part in (stored.split("x") if isinstance(stored, str) else stored)]
        parts = [int(part) if part.isdecimal() and len(part) < 10 else 0 for part in block]
        if len(parts) != 2 or min(parts) < 1:
            raise wrong("block_structure", "[outputs, inputs], each at least 1", scheme.block_structure)
        return parts[0], parts[1]
    return None if scheme.per == "tensor" else (1, -1)


CT_VARIANTS = (f"compressed-tensors ({', '.join(CT_FORMATS)})",)
