"""Marlin: `marlin`, `gptq_marlin_24`, and `gptq` with one of their checkpoint formats.

Source: IST's packer 2f6d7c1 and vLLM 0.11.0.
"""

from typing import Annotated, Literal

from pydantic import Field

from qload import configs
from qload.errors import UnsupportedFormatError
from qload.formats.marlin import MarlinConfig, MarlinWeight
from qload.formats.marlin_24 import Marlin24Config, Marlin24Weight
from qload.loader import ConfiguredFormat

VARIANTS = ("marlin (checkpoint_format marlin, marlin_24)",)
CHECKPOINT_FORMATS = ("marlin", "marlin_24")


class _Marlin(configs.Section):
    bits: Annotated[int, configs.one_of(4, 8)] = 4
    group_size: int = Field(ge=-1)
    desc_act: Literal[False] | None = None
    sym: Literal[True] | None = None
    checkpoint_format: configs.Name = None
    format: configs.Name = None
    pack_dtype: Literal["int32"] | None = None
    is_marlin_format: bool | None = None
    is_marlin_24_format: bool | None = None


def read_marlin(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of layers in Marlin's order: symmetric, groups in order."""
    default = "marlin_24" if source.values.get("quant_method") == "gptq_marlin_24" else "marlin"
    section = configs.validate(_Marlin, source)
    stated = configs.agree(source, "checkpoint_format", "format")
    if section.is_marlin_24_format or default == "marlin_24":
        stated = stated if stated not in (None, "marlin", "gptq") else "marlin_24"
    stated = stated or default
    if stated not in CHECKPOINT_FORMATS:
        raise UnsupportedFormatError(
            stated, f"the checkpoint_format of {source.file} is not supported", VARIANTS
        )
    configs.check_group_size(source, section.group_size)
    size, bits = section.group_size, section.bits
    if stated == "marlin_24":
        fmt = ConfiguredFormat(Marlin24Weight, Marlin24Config(size, bits))
    else:
        fmt = ConfiguredFormat(MarlinWeight, MarlinConfig(size, bits))
    return section.claims(source, "marlin", stated, fmt, bits=bits, group_size=size, sym=True, desc_act=False)


METHODS = (
    configs.Method(
        names=("marlin",), read=read_marlin, formats=(MarlinWeight, Marlin24Weight), variants=VARIANTS
    ),
    configs.Method(names=("gptq_marlin_24",), read=read_marlin, formats=(Marlin24Weight,), variants=VARIANTS),
)
