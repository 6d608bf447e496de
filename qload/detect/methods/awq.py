"""`quant_method: awq`."""

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from qload.detect.files import FoundConfig
from qload.detect.validation import Claims, Name, Section, agree, check_group_size, one_of, validate
from qload.errors import UnsupportedFormatError
from qload.formats import AWQConfig, AWQWeight
from qload.loader import ConfiguredFormat

KNOWN = ("awq (version gemm)",)
FORMATS = ("gemm",)


class _AWQ(Section):
    bits: Annotated[int, one_of(4, 8)] = Field(validation_alias=AliasChoices("bits", "w_bit"))
    group_size: int = Field(ge=-1, validation_alias=AliasChoices("group_size", "q_group_size"))
    zero_point: bool | None = None
    version: Name = None
    checkpoint_format: Name = None
    format: Name = None
    pack_dtype: Literal["int32"] | None = None
    backend: str | None = None


def read(found: FoundConfig) -> Claims:
    """The claims of `quant_method: awq`; only the GEMM layout is read."""
    read = validate(_AWQ, found)
    agree(found, "bits", "w_bit")
    agree(found, "group_size", "q_group_size")
    variants = [name.lower() for name in (read.version, read.checkpoint_format, read.format) if name]
    for variant in variants or ["gemm"]:
        if variant not in FORMATS:
            raise UnsupportedFormatError(
                f"awq_{variant}", f"the version of {found.file} has no reader", KNOWN
            )
    if read.backend == "llm-awq":
        raise UnsupportedFormatError("llm-awq", f"the backend of {found.file} packs in another order", KNOWN)
    check_group_size(found, read.group_size, "group_size", "q_group_size")
    sym = None if read.zero_point is None else not read.zero_point
    config = AWQConfig(read.group_size, read.bits, zero_point=sym is not True)
    return Claims(
        method="awq",
        format="gemm",
        bits=read.bits,
        group_size=read.group_size,
        sym=sym,
        desc_act=None,
        file=found.file,
        section=found.section,
        exclusions=read.exclusions(),
        formats=(ConfiguredFormat(AWQWeight, config),),
    )
