"""`quant_method: gptq`.

`dynamic` maps patterns to what holds for the modules they match, from the start of the name, instead of what
the config says; `-:` before a pattern leaves them out. The first pattern that matches counts.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qload.detect.files import FoundConfig
from qload.detect.matching import REGEX, Ignored, check, matcher
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
from qload.formats import GPTQConfig, GPTQWeight, UnquantizedConfig, UnquantizedWeight
from qload.layouts import STORED_MINUS_ONE, Stored, ZeroPoints
from qload.loader import ConfiguredFormat, FormatLoader
from qload.loader.exclusion import Exclusions
from qload.loader.modules import ModuleLoader

KNOWN = ("gptq (checkpoint_format gptq, gptq_v2, marlin, marlin_24)",)
FORMATS = ("gptq", "gptq_v2")
PLAIN = ConfiguredFormat(UnquantizedWeight, UnquantizedConfig())
WITHOUT, WITH = "-:", "+:"  # before a pattern; nothing means the second

Bits = Annotated[int, one_of(2, 3, 4, 8)]


class _Rule(BaseModel):
    """What a pattern changes; whatever else it says concerns whoever quantized."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    bits: Bits | None = None
    group_size: int | None = Field(default=None, ge=-1)


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
    dynamic: Annotated[dict[str, _Rule] | None, BeforeValidator(none_for_false)] = None


def read(found: FoundConfig) -> Claims:
    """The claims of `quant_method: gptq`, Marlin checkpoints that say gptq among them."""
    read = validate(_GPTQ, found)
    stated = agree(found, "checkpoint_format", "format") or "gptq"
    if stated in marlin.FORMATS or read.is_marlin_format:
        return marlin.read(found)
    if stated not in FORMATS:
        raise UnsupportedFormatError(stated, f"the checkpoint_format of {found.file} has no reader", KNOWN)
    check_group_size(found, read.group_size)
    zeros: ZeroPoints = Stored() if stated == "gptq_v2" else STORED_MINUS_ONE
    config = GPTQConfig(read.bits, read.group_size, zeros, desc_act=read.desc_act)
    rules = _rules(found, read.dynamic or {})
    formats = {
        pattern: ConfiguredFormat(GPTQWeight, _changed(config, rule))
        for pattern, rule in rules.items()
        if rule
    }
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
        formats=tuple(dict.fromkeys([ConfiguredFormat(GPTQWeight, config), *formats.values()])),
        loader=_loader(rules, formats, ConfiguredFormat(GPTQWeight, config), read.exclusions())
        if rules
        else None,
    )


def _rules(found: FoundConfig, dynamic: Mapping[str, _Rule]) -> dict[str, _Rule | None]:
    """Entry -> what it changes, None where it leaves modules out; in the order they count."""
    rules: dict[str, _Rule | None] = {}
    for pattern, rule in dynamic.items():
        entry = REGEX + pattern.removeprefix(WITHOUT).removeprefix(WITH)
        check(found, "dynamic", [entry])
        if rule.group_size is not None:
            check_group_size(found, rule.group_size)
        rules.setdefault(entry, None if pattern.startswith(WITHOUT) else rule)
    return rules


def _changed(config: GPTQConfig, rule: _Rule) -> GPTQConfig:
    changes = {name: value for name in ("bits", "group_size") if (value := getattr(rule, name)) is not None}
    return replace(config, **changes)


def _loader(
    rules: Mapping[str, _Rule | None],
    formats: Mapping[str, ConfiguredFormat],
    fmt: ConfiguredFormat,
    exclusions: Exclusions,
) -> Callable[[], FormatLoader]:
    """What makes a loader that asks one rule after another."""
    everything = dict.fromkeys([fmt, *formats.values()])
    without = Ignored(tuple(entry for entry, rule in rules.items() if rule is None), "dynamic")
    choices = [
        (
            matcher(entry),
            FormatLoader(formats[entry], PLAIN, exclusions=exclusions)
            if rule
            else FormatLoader(*everything, PLAIN, exclusions=without),
        )
        for entry, rule in rules.items()
    ]
    return lambda: ModuleLoader(choices, FormatLoader(fmt, PLAIN, exclusions=exclusions))
