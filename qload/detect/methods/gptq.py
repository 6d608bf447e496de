"""`quant_method: gptq`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from qload.detect.files import Found, shown
from qload.detect.methods import marlin
from qload.detect.validation import (
    Claims,
    Name,
    Section,
    agree,
    check_group_size,
    none_for_false,
    one_of,
    validate,
)
from qload.errors import UnsupportedFormatError
from qload.formats import GPTQConfig, GPTQWeight
from qload.layouts import STORED_MINUS_ONE, Stored, ZeroPoints
from qload.loader import Room

KNOWN = ("gptq (checkpoint_format gptq, gptq_v2, marlin, marlin_24)",)
FORMATS = ("gptq", "gptq_v2")


class _GPTQ(Section):
    bits: Annotated[int, one_of(2, 3, 4, 8)]
    group_size: int = Field(ge=-1)
    desc_act: bool | None = None
    sym: bool | None = None
    checkpoint_format: Name = None
    format: Name = None
    pack_dtype: Literal["int32"] | None = None
    is_marlin_format: bool | None = None
    lm_head: bool | None = None
    dynamic: Annotated[dict[str, dict[str, Any]] | None, BeforeValidator(none_for_false)] = None


def read(found: Found) -> Claims:
    """The claims of `quant_method: gptq`, Marlin checkpoints that say gptq among them."""
    read = validate(_GPTQ, found)
    stated = agree(found, "checkpoint_format", "format") or "gptq"
    if stated in marlin.FORMATS or read.is_marlin_format:
        return marlin.read(found)
    if stated not in FORMATS:
        raise UnsupportedFormatError(stated, f"the checkpoint_format of {found.file} has no reader", KNOWN)
    check_group_size(found, read.group_size)
    for rule, override in (read.dynamic or {}).items():
        changed = {name: override[name] for name in ("bits", "group_size") if name in override}
        if changed and not rule.startswith("-:"):
            raise UnsupportedFormatError(
                "gptq with dynamic rules",
                f"rule {rule!r:.80} of {found.file} sets {shown(changed)}: modules differ",
                KNOWN,
            )
    zeros: ZeroPoints = Stored() if stated == "gptq_v2" else STORED_MINUS_ONE
    config = GPTQConfig(read.bits, read.group_size, zeros, desc_act=read.desc_act)
    return Claims(
        method="gptq",
        format=stated,
        bits=read.bits,
        group_size=read.group_size,
        sym=read.sym,
        desc_act=read.desc_act,
        file=found.file,
        section=found.section,
        exclusions=read.exclusions(),
        rooms=(Room(GPTQWeight, config),),
    )
