"""`quant_method: marlin` and `gptq_marlin_24`, and gptq checkpoints in Marlin's format."""

from typing import Annotated, Literal

from pydantic import Field

from qload.detect.files import FoundConfig
from qload.detect.validation import Claims, Name, Section, agree, check_group_size, one_of, validate
from qload.errors import UnsupportedFormatError
from qload.formats import Marlin24Config, Marlin24Weight, MarlinConfig, MarlinWeight
from qload.loader import ConfiguredFormat

KNOWN = ("marlin (checkpoint_format marlin, marlin_24)",)
FORMATS = ("marlin", "marlin_24")


class _Marlin(Section):
    bits: Annotated[int, one_of(4, 8)] = 4
    group_size: int = Field(ge=-1)
    desc_act: Literal[False] | None = None
    sym: Literal[True] | None = None
    checkpoint_format: Name = None
    format: Name = None
    pack_dtype: Literal["int32"] | None = None
    is_marlin_format: bool | None = None
    is_marlin_24_format: bool | None = None


def read(found: FoundConfig) -> Claims:
    """The claims of codes that are packed for the kernel already: symmetric, groups in order."""
    default = "marlin_24" if found.values.get("quant_method") == "gptq_marlin_24" else "marlin"
    read = validate(_Marlin, found)
    stated = agree(found, "checkpoint_format", "format")
    if read.is_marlin_24_format or default == "marlin_24":
        stated = stated if stated not in (None, "marlin", "gptq") else "marlin_24"
    stated = stated or default
    if stated not in FORMATS:
        raise UnsupportedFormatError(stated, f"the checkpoint_format of {found.file} has no reader", KNOWN)
    check_group_size(found, read.group_size)
    sparse = stated == "marlin_24"
    fmt = (
        ConfiguredFormat(Marlin24Weight, Marlin24Config(read.group_size, read.bits))
        if sparse
        else ConfiguredFormat(MarlinWeight, MarlinConfig(read.group_size, read.bits))
    )
    return Claims(
        method="marlin",
        format=stated,
        bits=read.bits,
        group_size=read.group_size,
        sym=True,
        desc_act=False,
        file=found.file,
        section=found.section,
        exclusions=read.exclusions(),
        formats=(fmt,),
    )
