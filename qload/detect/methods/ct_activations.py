"""What a group of compressed-tensors declares of its layers' inputs. No weight depends on it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from qload.detect.files import FoundConfig, shown
from qload.detect.validation import validate
from qload.errors import ConfigError
from qload.spec import ActivationScheme

# Where the scale of a tensor is stored that scales of groups come on top of, and where all others are.
STORED: Mapping[bool | str, str | None] = {"local": "input_global_scale", False: "input_scale", True: None}
ZERO_POINT = "input_zero_point"
ScaleType = Literal["float32", "e4m3", "e8m0"]
SCALE_TYPES: Mapping[str | None, ScaleType] = {
    "torch.float8_e4m3fn": "e4m3",
    "torch.uint8": "e8m0",
}
MICROSCALING = 32  # inputs that share a power of two
GROUPS = ("group", "tensor_group")


class _Inputs(BaseModel):
    """The tool's defaults are those of its own class."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="allow")

    num_bits: Annotated[int, Field(ge=1, le=64)] = 8
    type: Literal["int", "float"] = "int"
    dynamic: bool | Literal["local"] | None = False
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: str | None = None

    @property
    def shared_by(self) -> str:
        """Which inputs share a scale; where the config does not say, what the tool infers."""
        inferred = "tensor" if self.group_size is None else "group" if self.group_size > 0 else "channel"
        return self.strategy or inferred


def scheme_of(
    found: FoundConfig, key: str, stated: Mapping[str, Any] | None, weights: str | None = None
) -> ActivationScheme | None:
    """The scheme under a key of the config; None where there is none, ConfigError where it is malformed.

    `weights`: the format of the group's weights. Versions that say no type of scales have one for it.
    """
    if not stated:
        return None
    section = FoundConfig(found.file, found.key(key), stated)
    read = validate(_Inputs, section)
    dynamic, grouped = read.dynamic or False, read.shared_by in GROUPS
    if grouped and (read.group_size or 0) < 1:
        raise ConfigError(found.file, found.key(f"{key}.group_size"), "at least 1", shown(read.group_size))
    scale_type: ScaleType = SCALE_TYPES.get(read.scale_dtype, "float32")
    if read.scale_dtype is None and dynamic == "local":
        scale_type = "e4m3"
    elif read.scale_dtype is None and read.group_size == MICROSCALING and (weights or "").startswith("mxfp"):
        scale_type = "e8m0"
    return ActivationScheme(
        type=read.type,
        bits=read.num_bits,
        dynamic=dynamic,
        strategy=read.shared_by,
        group_size=read.group_size,
        symmetric=read.symmetric,
        scale=STORED[dynamic],
        zero_point=None if dynamic or read.symmetric else ZERO_POINT,
        scale_type=scale_type if dynamic else "float32",
    )
