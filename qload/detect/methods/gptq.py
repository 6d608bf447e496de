"""`quant_method: gptq`, and `gptq_marlin`, as engines name the kernel that they read the same files with.

`dynamic` maps patterns to what holds for the modules they match, from the start of the name, instead of what
the config says; `-:` before a pattern leaves them out. The first pattern that matches counts.
`modules_in_block_to_quantize` (optimum, transformers) names all modules of a block that are quantized, in a
list or in lists of lists.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qload.detect.files import FoundConfig, shown
from qload.detect.matching import REGEX
from qload.detect.methods import marlin
from qload.detect.regex import Patterns
from qload.detect.rules import ruled
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
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats import GPTQConfig, GPTQWeight
from qload.layouts import STORED_MINUS_ONE, Stored, ZeroPoints
from qload.loader import ConfiguredFormat
from qload.loader.exclusion import Exclusions, Inside
from qload.spec import LayerClaims

KNOWN = ("gptq (checkpoint_format gptq, gptq_v2, marlin, marlin_24)",)
FORMATS = ("gptq", "gptq_v2")
CLAIMED = ("bits", "group_size", "sym", "desc_act")  # claims that a rule may state
WITHOUT, WITH = "-:", "+:"  # before a pattern; nothing means the second

Module = Annotated[str, Field(min_length=1)]
Bits = Annotated[int, one_of(2, 3, 4, 8)]


class _Rule(BaseModel):
    """What a pattern changes; whatever else it says concerns whoever quantized."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    bits: Bits | None = None
    group_size: int | None = Field(default=None, ge=-1)
    sym: bool | None = None
    desc_act: bool | None = None
    pack_dtype: Literal["int32"] | None = None
    checkpoint_format: Name = None
    format: Name = None


class _GPTQ(Section):
    bits: Bits
    group_size: int = Field(ge=-1)
    desc_act: bool | None = None
    sym: bool | None = None
    checkpoint_format: Name = None
    format: Name = None
    pack_dtype: Literal["int32"] | None = None
    is_marlin_format: bool | None = None
    lm_head: bool | None = None
    modules_in_block_to_quantize: list[Module | list[Module]] | None = None
    dynamic: Annotated[dict[str, _Rule] | None, BeforeValidator(none_for_false)] = None


def read(found: FoundConfig) -> Claims:
    """The claims of `quant_method: gptq`, Marlin checkpoints that say gptq among them."""
    stated = agree(found, "checkpoint_format", "format") or "gptq"
    if isinstance(stated, str) and stated not in (*FORMATS, *marlin.FORMATS):
        raise UnsupportedFormatError(stated, f"the checkpoint_format of {found.file} has no reader", KNOWN)
    read = validate(_GPTQ, found)
    if stated in marlin.FORMATS or read.is_marlin_format:
        return marlin.read(found)
    check_group_size(found, read.group_size)
    zeros: ZeroPoints = Stored() if stated == "gptq_v2" else STORED_MINUS_ONE
    indexed = True if read.desc_act else None  # without act order tools may leave the index out
    config = GPTQConfig(read.bits, read.group_size, zeros, desc_act=read.desc_act, indexed=indexed)
    base = ConfiguredFormat(
        GPTQWeight,
        config,
        claims=LayerClaims(
            read.bits,
            read.group_size,
            read.sym,
            read.desc_act,
            convention="checkpoint_format",
            writer=_writer(found),
        ),
    )
    rules = _rules(found, read.dynamic or {}, base, stated)
    exclusions = _inside(read)
    return Claims(
        method="gptq",
        format=stated,
        bits=read.bits,
        group_size=read.group_size,
        sym=read.sym,
        desc_act=read.desc_act,
        file=found.file,
        section=found.section,
        exclusions=exclusions,
        formats=tuple(dict.fromkeys([base, *(fmt for formats in rules.values() for fmt in formats)])),
        loader=ruled(rules, (base,), exclusions, Patterns(found, "dynamic"), "dynamic") if rules else None,
    )


def _writer(found: FoundConfig) -> str:
    """Quantizer named in `meta.quantizer`, such as `gptqmodel:7.7.0`; "" if none is named."""
    meta = found.values.get("meta")
    named = meta.get("quantizer") if isinstance(meta, Mapping) else None
    first = named[0] if isinstance(named, list) and named else named
    return first if isinstance(first, str) else ""


def _inside(read: _GPTQ) -> Exclusions:
    """What the section leaves out: by name, or because it stands in a block and is not among its modules."""
    names = read.modules_in_block_to_quantize or []
    inside = [name for entry in names for name in ([entry] if isinstance(entry, str) else entry)]
    return Inside(tuple(inside), others=read.exclusions()) if inside else read.exclusions()


def _rules(
    found: FoundConfig, dynamic: Mapping[str, _Rule], base: ConfiguredFormat, stated: str
) -> dict[str, tuple[ConfiguredFormat, ...]]:
    """Entry -> the format that it asks for, none where it leaves modules out; in the order they count."""
    rules: dict[str, tuple[ConfiguredFormat, ...]] = {}
    for pattern, rule in dynamic.items():
        entry = REGEX + pattern.removeprefix(WITHOUT).removeprefix(WITH)
        if rule.group_size is not None:
            check_group_size(found, rule.group_size, f"dynamic.{pattern:.80}.group_size")
        for key, other in (("checkpoint_format", rule.checkpoint_format), ("format", rule.format)):
            if other not in (None, stated):
                where = found.key(f"dynamic.{pattern:.80}.{key}")
                hint = "remedy   state it once for all modules: no program reads it by module"
                raise ConfigError(found.file, where, f"{stated}, as for all modules", shown(other), hint)
        own = _changed(base, rule, f"dynamic.{pattern}")
        rules.setdefault(entry, () if pattern.startswith(WITHOUT) else (own,))
    return rules


def _changed(base: ConfiguredFormat, rule: _Rule, source: str) -> ConfiguredFormat:
    """Format and claims of a rule's modules."""
    assert isinstance(base.config, GPTQConfig)
    assert base.claims is not None
    stated = {key: value for key in CLAIMED if (value := getattr(rule, key)) is not None}
    own = {key: value for key, value in stated.items() if key != "sym"}
    if rule.desc_act is not None:
        own["indexed"] = True if rule.desc_act else None
    claims = replace(base.claims, source=source, **stated)
    return ConfiguredFormat(GPTQWeight, replace(base.config, **own), claims=claims)
