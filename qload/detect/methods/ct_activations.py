"""What a group of compressed-tensors claims of its layers' inputs. No weight depends on it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from qload.detect.files import FoundConfig
from qload.detect.validation import validate
from qload.spec import ActivationScheme

# Where the scale of a tensor is stored that scales of groups come on top of, and where all others are.
STORED: Mapping[bool | str, str | None] = {"local": "input_global_scale", False: "input_scale", True: None}


class _Inputs(BaseModel):
    """The tool's defaults are those of its own class."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="allow")

    num_bits: Annotated[int, Field(ge=1, le=64)] = 8
    type: Literal["int", "float"] = "int"
    dynamic: bool | Literal["local"] | None = False
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool = True


def scheme_of(found: FoundConfig, key: str, stated: Mapping[str, Any] | None) -> ActivationScheme | None:
    """The scheme under a key of the config; None where there is none, ConfigError where it is malformed."""
    if not stated:
        return None
    section = FoundConfig(found.file, found.key(key), stated)
    read = validate(_Inputs, section)
    dynamic = read.dynamic or False
    return ActivationScheme(
        read.type, read.num_bits, dynamic, read.strategy, read.group_size, read.symmetric, STORED[dynamic]
    )
