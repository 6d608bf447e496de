"""`quant_method: exl2`."""

from typing import Annotated, Any

from pydantic import Field

from qload.detect.files import FoundConfig
from qload.detect.validation import Claims, Name, Section, validate
from qload.formats import Exl2Config, Exl2Weight
from qload.loader import ConfiguredFormat

KNOWN = ("exl2",)


class _EXL2(Section):
    version: Name = None
    bits: Annotated[float, Field(gt=0, le=16, allow_inf_nan=False)] | None = None  # of all layers, on average
    head_bits: Annotated[int, Field(ge=2, le=16)] | None = None
    calibration: dict[str, Any] | None = None


def read(found: FoundConfig) -> Claims:
    """The claims of `quant_method: exl2`: none that a layer depends on, each says its own widths."""
    read = validate(_EXL2, found)
    return Claims(
        method="exl2",
        format="exl2",
        bits=None,
        group_size=None,
        sym=None,
        desc_act=None,
        file=found.file,
        section=found.section,
        exclusions=read.exclusions(),
        formats=(ConfiguredFormat(Exl2Weight, Exl2Config()),),
    )
