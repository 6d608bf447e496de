"""`quant_method: gptq`, `gptq_marlin` (the same files, by the name of an engine's kernel) and `marlin`.

`dynamic` maps patterns to settings of the modules with a match from the start of the name; `-:` before a
pattern excludes them. The first match counts. `modules_in_block_to_quantize` (optimum, transformers) lists
all quantized modules of a block, in a list or in lists of lists.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qload.detect.files import FoundConfig, shown
from qload.detect.matching import REGEX_PREFIX, Patterns, override_loader
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
from qload.formats import GPTQConfig, GPTQWeight, Marlin24Config, Marlin24Weight, MarlinConfig, MarlinWeight
from qload.layouts import STORED_MINUS_ONE, Stored, ZeroPoints
from qload.loader import ConfiguredFormat
from qload.loader.exclusion import Exclusions, Inside
from qload.spec import LayerClaims

MARLIN_VARIANTS = ("marlin (checkpoint_format marlin, marlin_24)",)
MARLIN_FORMATS = ("marlin", "marlin_24")


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


def read_marlin(found: FoundConfig) -> Claims:
    """The claims of codes that are packed for the kernel already: symmetric, groups in order."""
    default = "marlin_24" if found.values.get("quant_method") == "gptq_marlin_24" else "marlin"
    section = validate(_Marlin, found)
    stated = agree(found, "checkpoint_format", "format")
    if section.is_marlin_24_format or default == "marlin_24":
        stated = stated if stated not in (None, "marlin", "gptq") else "marlin_24"
    stated = stated or default
    if stated not in MARLIN_FORMATS:
        raise UnsupportedFormatError(
            stated, f"the checkpoint_format of {found.file} has no reader", MARLIN_VARIANTS
        )
    check_group_size(found, section.group_size)
    sparse = stated == "marlin_24"
    fmt = (
        ConfiguredFormat(Marlin24Weight, Marlin24Config(section.group_size, section.bits))
        if sparse
        else ConfiguredFormat(MarlinWeight, MarlinConfig(section.group_size, section.bits))
    )
    return Claims(
        method="marlin",
        format=stated,
        bits=section.bits,
        group_size=section.group_size,
        sym=True,
        desc_act=False,
        file=found.file,
        section=found.section,
        exclusions=section.exclusions(),
        formats=(fmt,),
    )


GPTQ_VARIANTS = ("gptq (checkpoint_format gptq, gptq_v2, marlin, marlin_24)",)
GPTQ_FORMATS = ("gptq", "gptq_v2")
CLAIMED = ("bits", "group_size", "sym", "desc_act")  # claims that a rule may state
EXCLUDE_PREFIX, INCLUDE_PREFIX = "-:", "+:"  # before a pattern; nothing means the second

Module = Annotated[str, Field(min_length=1)]
Bits = Annotated[int, one_of(2, 3, 4, 8)]


class _ModuleSettings(BaseModel):
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
    dynamic: Annotated[dict[str, _ModuleSettings] | None, BeforeValidator(none_for_false)] = None


def read_gptq(found: FoundConfig) -> Claims:
    """The claims of `quant_method: gptq`, Marlin checkpoints that say gptq among them."""
    stated = agree(found, "checkpoint_format", "format") or "gptq"
    if isinstance(stated, str) and stated not in (*GPTQ_FORMATS, *MARLIN_FORMATS):
        raise UnsupportedFormatError(
            stated, f"the checkpoint_format of {found.file} has no reader", GPTQ_VARIANTS
        )
    section = validate(_GPTQ, found)
    if stated in MARLIN_FORMATS or section.is_marlin_format:
        return read_marlin(found)
    check_group_size(found, section.group_size)
    zeros: ZeroPoints = Stored() if stated == "gptq_v2" else STORED_MINUS_ONE
    indexed = True if section.desc_act else None  # without act order tools may leave the index out
    config = GPTQConfig(section.bits, section.group_size, zeros, desc_act=section.desc_act, indexed=indexed)
    base = ConfiguredFormat(
        GPTQWeight,
        config,
        claims=LayerClaims(
            section.bits,
            section.group_size,
            section.sym,
            section.desc_act,
            convention="checkpoint_format",
            writer=_writer(found),
        ),
    )
    rules = _module_formats(found, section.dynamic or {}, base, stated)
    exclusions = _exclusions(section)
    return Claims(
        method="gptq",
        format=stated,
        bits=section.bits,
        group_size=section.group_size,
        sym=section.sym,
        desc_act=section.desc_act,
        file=found.file,
        section=found.section,
        exclusions=exclusions,
        formats=tuple(dict.fromkeys([base, *(fmt for formats in rules.values() for fmt in formats)])),
        loader=override_loader(rules, (base,), exclusions, Patterns(found, "dynamic"), "dynamic")
        if rules
        else None,
    )


def _writer(found: FoundConfig) -> str:
    """Quantizer named in `meta.quantizer`, such as `gptqmodel:7.7.0`; "" if none is named."""
    meta = found.values.get("meta")
    named = meta.get("quantizer") if isinstance(meta, Mapping) else None
    first = named[0] if isinstance(named, list) and named else named
    return first if isinstance(first, str) else ""


def _exclusions(section: _GPTQ) -> Exclusions:
    """What the section leaves out: by name, or because it stands in a block and is not among its modules."""
    names = section.modules_in_block_to_quantize or []
    inside = [name for entry in names for name in ([entry] if isinstance(entry, str) else entry)]
    return Inside(tuple(inside), others=section.exclusions()) if inside else section.exclusions()


def _module_formats(
    found: FoundConfig, dynamic: Mapping[str, _ModuleSettings], base: ConfiguredFormat, stated: str
) -> dict[str, tuple[ConfiguredFormat, ...]]:
    """Entry -> the format that it asks for, none where it leaves modules out; in the order they count."""
    rules: dict[str, tuple[ConfiguredFormat, ...]] = {}
    for pattern, rule in dynamic.items():
        entry = REGEX_PREFIX + pattern.removeprefix(EXCLUDE_PREFIX).removeprefix(INCLUDE_PREFIX)
        if rule.group_size is not None:
            check_group_size(found, rule.group_size, f"dynamic.{pattern:.80}.group_size")
        for key, other in (("checkpoint_format", rule.checkpoint_format), ("format", rule.format)):
            if other not in (None, stated):
                where = found.key(f"dynamic.{pattern:.80}.{key}")
                hint = "remedy   state it once for all modules: no program reads it by module"
                raise ConfigError(found.file, where, f"{stated}, as for all modules", shown(other), hint)
        own = _overridden(base, rule, f"dynamic.{pattern}")
        rules.setdefault(entry, () if pattern.startswith(EXCLUDE_PREFIX) else (own,))
    return rules


def _overridden(base: ConfiguredFormat, rule: _ModuleSettings, source: str) -> ConfiguredFormat:
    """Format and claims of a rule's modules."""
    assert isinstance(base.config, GPTQConfig)
    assert base.claims is not None
    stated = {key: value for key in CLAIMED if (value := getattr(rule, key)) is not None}
    own = {key: value for key, value in stated.items() if key != "sym"}
    if rule.desc_act is not None:
        own["indexed"] = True if rule.desc_act else None
    claims = replace(base.claims, source=source, **stated)
    return ConfiguredFormat(GPTQWeight, replace(base.config, **own), claims=claims)
