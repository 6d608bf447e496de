"""GPTQ and Marlin: `gptq`, `gptq_marlin`, `marlin` and `gptq_marlin_24`.

A config of `gptq` may have a checkpoint format of Marlin, and settings of single modules in `dynamic`.
Source: gptqmodel 7.7.0, auto-gptq 0.7.1, IST's packer 2f6d7c1 and vLLM 0.11.0.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qload import configs
from qload.configs.matching import REGEX_PREFIX
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats.gptq import GPTQConfig, GPTQWeight
from qload.formats.marlin import MarlinConfig, MarlinWeight
from qload.formats.marlin_24 import Marlin24Config, Marlin24Weight
from qload.layouts import STORED_MINUS_ONE, Stored, ZeroPoints
from qload.loader import ConfiguredFormat
from qload.loader.exclusion import Exclusions, Inside
from qload.spec import LayerClaims

VARIANTS = ("gptq (checkpoint_format gptq, gptq_v2, marlin, marlin_24)",)
MARLIN_VARIANTS = ("marlin (checkpoint_format marlin, marlin_24)",)
CHECKPOINT_FORMATS = ("gptq", "gptq_v2")
MARLIN_FORMATS = ("marlin", "marlin_24")
MODULE_CLAIMS = ("bits", "group_size", "sym", "desc_act")  # possible claims of an entry of `dynamic`
EXCLUDE_PREFIX, INCLUDE_PREFIX = "-:", "+:"  # of a pattern; a pattern without prefix includes

Module = Annotated[str, Field(min_length=1)]
Bits = Annotated[int, configs.one_of(2, 3, 4, 8)]


class _ModuleSettings(BaseModel):
    """Settings of an entry of `dynamic`; other keys are for the quantizer."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    bits: Bits | None = None
    group_size: int | None = Field(default=None, ge=-1)
    sym: bool | None = None
    desc_act: bool | None = None
    pack_dtype: Literal["int32"] | None = None
    checkpoint_format: configs.Name = None
    format: configs.Name = None


class _GPTQ(configs.Section):
    bits: Bits
    group_size: int = Field(ge=-1)
    desc_act: bool | None = None
    sym: bool | None = None
    checkpoint_format: configs.Name = None
    format: configs.Name = None
    pack_dtype: Literal["int32"] | None = None
    is_marlin_format: bool | None = None
    lm_head: bool | None = None
    modules_in_block_to_quantize: list[Module | list[Module]] | None = None
    dynamic: Annotated[dict[str, _ModuleSettings] | None, BeforeValidator(configs.none_for_false)] = None


def read_gptq(source: configs.FoundConfig) -> configs.Claims | str:
    """Read the claims of `quant_method: gptq`; "marlin" for weights in Marlin's order."""
    stated = configs.agree(source, "checkpoint_format", "format") or "gptq"
    if isinstance(stated, str) and stated not in (*CHECKPOINT_FORMATS, *MARLIN_FORMATS):
        raise UnsupportedFormatError(
            stated, f"the checkpoint_format of {source.file} is not supported", VARIANTS
        )
    section = configs.validate(_GPTQ, source)
    if stated in MARLIN_FORMATS or section.is_marlin_format:
        return "marlin"
    configs.check_group_size(source, section.group_size)
    zeros: ZeroPoints = Stored() if stated == "gptq_v2" else STORED_MINUS_ONE
    indexed = True if section.desc_act else None  # without act order tools may omit the index
    config = GPTQConfig(section.bits, section.group_size, zeros, desc_act=section.desc_act, indexed=indexed)
    stated_claims = {key: getattr(section, key) for key in MODULE_CLAIMS}
    claims = LayerClaims(**stated_claims, convention="checkpoint_format", writer=_writer(source))
    base = ConfiguredFormat(GPTQWeight, config, claims=claims)
    rules = _module_formats(source, section.dynamic or {}, base, stated)
    formats = dict.fromkeys([base, *(fmt for formats in rules.values() for fmt in formats)])
    exclusions = _exclusions(section)
    overrides: tuple[configs.ModuleRule, ...] = ()
    if rules:
        patterns = configs.Patterns(source, "dynamic")
        overrides = configs.override_rules(rules, (base,), exclusions, patterns)
    return section.claims(
        source,
        "gptq",
        stated,
        *formats,
        **stated_claims,
        exclusions=exclusions,
        rules=overrides,
    )


def _writer(source: configs.FoundConfig) -> str:
    """Quantizer in `meta.quantizer`, such as `gptqmodel:7.7.0`; "" without a name."""
    meta = source.values.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    first = quantizer[0] if isinstance(quantizer, list) and quantizer else quantizer
    return first if isinstance(first, str) else ""


def _exclusions(section: _GPTQ) -> Exclusions:
    """Excluded modules: listed by name, or inside a block and not listed as quantized."""
    names = section.modules_in_block_to_quantize or []
    inside = [name for entry in names for name in ([entry] if isinstance(entry, str) else entry)]
    return Inside(tuple(inside), others=section.exclusions()) if inside else section.exclusions()


def _module_formats(
    source: configs.FoundConfig, dynamic: Mapping[str, _ModuleSettings], base: ConfiguredFormat, stated: str
) -> dict[str, tuple[ConfiguredFormat, ...]]:
    """Entry of `dynamic` -> its format, none for excluded modules; in order of precedence."""
    rules: dict[str, tuple[ConfiguredFormat, ...]] = {}
    for pattern, rule in dynamic.items():
        entry = REGEX_PREFIX + pattern.removeprefix(EXCLUDE_PREFIX).removeprefix(INCLUDE_PREFIX)
        if rule.group_size is not None:
            configs.check_group_size(source, rule.group_size, f"dynamic.{pattern:.80}.group_size")
        for key, other in (("checkpoint_format", rule.checkpoint_format), ("format", rule.format)):
            if other not in (None, stated):
                key_path = source.key(f"dynamic.{pattern:.80}.{key}")
                hint = "remedy   state it once for all modules: no program reads it by module"
                raise ConfigError(
                    source.file, key_path, f"{stated}, as for all modules", configs.value_text(other), hint
                )
        fmt = _overridden(base, rule, f"dynamic.{pattern}")
        rules.setdefault(entry, () if pattern.startswith(EXCLUDE_PREFIX) else (fmt,))
    return rules


def _overridden(base: ConfiguredFormat, rule: _ModuleSettings, source: str) -> ConfiguredFormat:
    """Format of an entry's modules, with the claims of the entry."""
    assert isinstance(base.config, GPTQConfig)
    assert base.claims is not None
    stated = {key: value for key in MODULE_CLAIMS if (value := getattr(rule, key)) is not None}
    changes = {key: value for key, value in stated.items() if key != "sym"}
    if rule.desc_act is not None:
        changes["indexed"] = True if rule.desc_act else None
    claims = replace(base.claims, source=source, **stated)
    return ConfiguredFormat(GPTQWeight, replace(base.config, **changes), claims=claims)


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
    if stated not in MARLIN_FORMATS:
        raise UnsupportedFormatError(
            stated, f"the checkpoint_format of {source.file} is not supported", MARLIN_VARIANTS
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
        names=("gptq", "gptq_marlin"),
        read=read_gptq,
        formats=(GPTQWeight,),
        variants=VARIANTS,
        others=("marlin",),
        exclusion_key="a pattern with '-:' in dynamic",
        module_key="dynamic",
        ignored={
            "adapter": configs.IgnoredKey(
                "adds a low-rank product to outputs; qload reads the stored weights without it"
            ),
            "rotation": configs.IgnoredKey("rotated weights before quantization; qload reads them as stored"),
        },
    ),
    configs.Method(
        names=("marlin",), read=read_marlin, formats=(MarlinWeight, Marlin24Weight), variants=MARLIN_VARIANTS
    ),
    configs.Method(
        names=("gptq_marlin_24",), read=read_marlin, formats=(Marlin24Weight,), variants=MARLIN_VARIANTS
    ),
)
