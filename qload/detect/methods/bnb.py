"""`quant_method: bitsandbytes`, and the configs from before there was that key."""

from typing import Annotated, Literal

from pydantic import Field

from qload.detect.files import FoundConfig
from qload.detect.validation import Claims, Section, agree, validate
from qload.errors import ConfigError
from qload.formats import BNB4Config, BNBConfig, BNBFP4Weight, BNBNF4Weight, BNBWeight
from qload.loader import ConfiguredFormat

KNOWN = ("bitsandbytes (load_in_4bit, load_in_8bit)",)
FLAGS = ("load_in_4bit", "load_in_8bit")


class _BNB(Section):
    load_in_4bit: bool | None = None
    load_in_8bit: bool | None = None
    bnb_4bit_quant_type: Literal["nf4", "fp4"] | None = None
    bnb_4bit_use_double_quant: bool | None = None
    bnb_4bit_compute_dtype: Annotated[str, Field(min_length=1)] | None = None
    bnb_4bit_quant_storage: Annotated[str, Field(min_length=1)] | None = None
    llm_int8_threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    llm_int8_skip_modules: list[Annotated[str, Field(min_length=1)]] | None = None
    llm_int8_enable_fp32_cpu_offload: bool | None = None
    llm_int8_has_fp16_weight: bool | None = None

    lists = ("llm_int8_skip_modules", "modules_to_not_convert")


def read(found: FoundConfig) -> Claims:
    """The claims of bitsandbytes; which type of 4 bits a layer has, its own state says."""
    read = validate(_BNB, found)
    for flag in FLAGS:
        agree(found, flag, f"_{flag}")
    if bool(read.load_in_4bit) == bool(read.load_in_8bit):
        key, both = found.key("load_in_4bit"), read.load_in_4bit
        raise ConfigError(
            found.file, key, "true, or load_in_8bit true, not both", "both" if both else "neither"
        )
    kind, bits = (read.bnb_4bit_quant_type or "fp4", 4) if read.load_in_4bit else ("int8", 8)
    return Claims(
        method="bitsandbytes",
        format=kind,
        bits=bits,
        group_size=None,
        sym=None,
        desc_act=None,
        file=found.file,
        section=found.section,
        exclusions=read.exclusions(),
        formats=_four(read) if bits == 4 else (ConfiguredFormat(BNBWeight, BNBConfig()),),
    )


def _four(read: _BNB) -> tuple[ConfiguredFormat, ...]:
    """Both types, the one that is claimed first."""
    claim = read.bnb_4bit_use_double_quant
    nf4 = ConfiguredFormat(BNBNF4Weight, BNB4Config("nf4", double_quant=claim))
    fp4 = ConfiguredFormat(BNBFP4Weight, BNB4Config("fp4", double_quant=claim))
    return (nf4, fp4) if read.bnb_4bit_quant_type == "nf4" else (fp4, nf4)
