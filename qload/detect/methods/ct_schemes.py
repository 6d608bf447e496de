"""From a group's scheme and format to the format that reads its weights, as compressed-tensors means them."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from qload.detect.files import FoundConfig, shown
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats import (
    CTIntConfig,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackConfig,
    CTPackTensorConfig,
    CTPackTensorWeight,
    CTPackWeight,
    Fp8Config,
    Fp8Weight,
    Marlin24Config,
    Marlin24Weight,
    MXFP4Config,
    MXFP8Config,
    MXFP8Weight,
    NVFP4Config,
)
from qload.loader import ConfiguredFormat
from qload.spec import LayerClaims

# What each format stores: the type, the bits, and how weights may share a scale.
PER = Literal["tensor", "channel", "group", "block", "tensor_group"]
ANY = ("tensor", "channel", "group", "block")
FORMATS: dict[str, tuple[tuple[str, ...], range, tuple[str, ...]]] = {
    "pack-quantized": (("int",), range(2, 9), ("tensor", "channel", "group")),
    "int-quantized": (("int",), range(2, 9), ANY),
    "float-quantized": (("float",), range(8, 9), ANY),
    "naive-quantized": (("int", "float"), range(2, 9), ANY),
    "marlin-24": (("int",), range(4, 9, 4), ("channel", "group")),
    "nvfp4-pack-quantized": (("float",), range(4, 5), ("tensor_group",)),
    "mxfp4-pack-quantized": (("float",), range(4, 5), ("group",)),
    "mxfp8-quantized": (("float",), range(8, 9), ("group",)),
}


class Scheme(BaseModel):
    """How the weights of a group are quantized."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="allow")

    num_bits: int
    type: Literal["int", "float"] = "int"
    strategy: PER | None = None
    group_size: Annotated[int, Field(ge=-1)] | None = None
    block_structure: list[Annotated[int, Field(ge=1)]] | str | None = None
    symmetric: bool = True
    actorder: Literal["group", "weight", "dynamic", "static"] | bool | None = None

    def claims(self, source: str) -> LayerClaims:
        """Claims about each layer of the scheme; `source`: the path of the scheme in the config."""
        act_order = (
            self.actorder in ("group", "dynamic", True) if "actorder" in self.model_fields_set else None
        )
        return LayerClaims(self.num_bits, self.rows_of_a_group, self.symmetric, act_order, source)

    @property
    def per(self) -> str:
        """What shares a scale; where it is not said, the group size tells."""
        default = "tensor" if self.group_size is None else "group" if self.group_size > 0 else "channel"
        return self.strategy or default

    @property
    def rows_of_a_group(self) -> int | None:
        """Inputs that share a scale; -1: all of them."""
        return (
            self.group_size
            if self.per in ("group", "tensor_group")
            else -1
            if self.per == "channel"
            else None
        )


def format_of(
    found: FoundConfig,
    key: Callable[[str], str],
    stated: str,
    scheme: Scheme,
    *,
    static: bool,
    dense: bool | None,
) -> ConfiguredFormat:
    """The format that reads a scheme.

    `key`: the place in the config of a setting by its name, and of the format by "".
    `static`: activations have stored scales. `dense`: what the version says.
    """
    if stated not in FORMATS:
        raise UnsupportedFormatError(
            f"compressed-tensors ({stated:.40})",
            f"{found.key(key(''))} of {found.file} has no reader",
            (*FORMATS,),
        )
    block, size = _checked(found, key, stated, scheme), scheme.rows_of_a_group or -1
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


def _checked(
    found: FoundConfig, key: Callable[[str], str], stated: str, scheme: Scheme
) -> tuple[int, int] | None:
    """What shares a scale, as (outputs, inputs); ConfigError for what the format does not store."""
    types, bits, strategies = FORMATS[stated]
    bits = range(8, 9) if scheme.type == "float" and stated == "naive-quantized" else bits

    def wrong(name: str, expected: str, got: Any) -> ConfigError:
        return ConfigError(found.file, found.key(key(name)), f"{expected} in {stated}", shown(got))

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
