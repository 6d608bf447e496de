"""bitsandbytes: `load_in_4bit` or `load_in_8bit`, with the type of 4-bit codes.

The state of a 4-bit layer takes precedence. Source: transformers 5.23.0 and bitsandbytes 0.50.2.
"""

from typing import Annotated, Literal

from pydantic import Field

from qload import configs
from qload.errors import ConfigError
from qload.formats.bnb import BNB4Config, BNBFP4Weight, BNBNF4Weight
from qload.formats.bnb_int8 import BNBConfig, BNBWeight
from qload.loader import ConfiguredFormat

VARIANTS = ("bitsandbytes (load_in_4bit, load_in_8bit)",)
FLAGS = ("load_in_4bit", "load_in_8bit")


class _BNB(configs.Section):
    load_in_4bit: bool | None = None
    load_in_8bit: bool | None = None
    bnb_4bit_quant_type: Literal["nf4", "fp4"] | None = None
    bnb_4bit_use_double_quant: bool | None = None
    bnb_4bit_compute_dtype: Annotated[str, Field(min_length=1)] | None = None
    bnb_4bit_quant_storage: Annotated[str, Field(min_length=1)] | None = None
    llm_int8_threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    llm_int8_skip_modules: configs.NameList | None = None
    llm_int8_enable_fp32_cpu_offload: bool | None = None
    llm_int8_has_fp16_weight: bool | None = None

    lists = ("llm_int8_skip_modules", "modules_to_not_convert")


def read_bitsandbytes(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of bitsandbytes; the state of a 4-bit layer tells NF4 from FP4."""
    section = configs.validate(_BNB, source)
    for flag in FLAGS:
        configs.agree(source, flag, f"_{flag}")
    if bool(section.load_in_4bit) == bool(section.load_in_8bit):
        key, got = source.key("load_in_4bit"), "both" if section.load_in_4bit else "neither"
        raise ConfigError(source.file, key, "true, or load_in_8bit true, not both", got)
    if section.load_in_8bit:
        return section.claims(
            source, "bitsandbytes", "int8", ConfiguredFormat(BNBWeight, BNBConfig()), bits=8
        )
    double_quant = section.bnb_4bit_use_double_quant
    nf4 = ConfiguredFormat(BNBNF4Weight, BNB4Config("nf4", double_quant=double_quant))
    fp4 = ConfiguredFormat(BNBFP4Weight, BNB4Config("fp4", double_quant=double_quant))
    quant_type = section.bnb_4bit_quant_type or "fp4"
    formats = (nf4, fp4) if quant_type == "nf4" else (fp4, nf4)  # the claimed one first
    return section.claims(source, "bitsandbytes", quant_type, *formats, bits=4)


METHODS = (
    configs.Method(
        names=("bitsandbytes",),
        read=read_bitsandbytes,
        formats=(BNBNF4Weight, BNBFP4Weight, BNBWeight),
        variants=VARIANTS,
        exclusion_key="llm_int8_skip_modules",
    ),
)
