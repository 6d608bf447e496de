"""Entries of a quantization config that select modules to quantize, by name or by pattern.

    gptq                dynamic (patterns without '-:'), modules_in_block_to_quantize, lm_head: true
    auto-round          extra_config: names and patterns with fewer than 16 bits
    compressed-tensors  config_groups.*.targets; `Linear` means the head as well
    modelopt            quantized_layers, or config_groups.*.targets beside MIXED_PRECISION

Entries that exclude modules are `Exclusions` of the loader.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qload.detect.files import FoundConfig
from qload.detect.matching import CLASSES, EMBEDDING, LINEAR, REGEX, is_regex, matches
from qload.detect.methods import auto_round, gptq
from qload.detect.regex import Patterns
from qload.loader.exclusion import Exclusions
from qload.loader.named_modules import NamedModules

HEAD = "lm_head"
MODELOPT = "modelopt"
# Method -> how its config excludes a module; a list that the config already has is named instead.
LEAVING_OUT: Mapping[str, str] = {
    "gptq": "a pattern with '-:' in dynamic",
    "gptq_marlin": "a pattern with '-:' in dynamic",
    "auto-round": "16 bits in extra_config",
    "compressed-tensors": "ignore",
    "modelopt": "exclude_modules, or ignore in config.json",
    "bitsandbytes": "llm_int8_skip_modules",
}
LISTS = (
    "ignore", "exclude_modules", "ignored_layers", "llm_int8_skip_modules", "modules_to_not_convert",
)  # fmt: skip


@dataclass(frozen=True)
class PatternEntry:
    """A pattern that selects modules to quantize: its key, its text, and its predicate on names."""

    key: str
    text: str
    means: Callable[[str], bool]


def leaving_out(source: FoundConfig) -> str:
    """Describe how to exclude a module: by the list in this config, else by the key of its method."""
    listed = next((key for key in LISTS if isinstance(source.values.get(key), list)), None)
    return listed or LEAVING_OUT.get(_method(source), "modules_to_not_convert")


def named_modules(source: FoundConfig) -> NamedModules:
    """Collect the modules listed by name as quantized."""
    keys: dict[str, str] = {}
    for name, key in _names(source):
        keys.setdefault(name, key)
    return NamedModules(keys, leaving_out(source))


def pattern_entries(source: FoundConfig) -> Iterator[PatternEntry]:
    """Yield the entries that select modules by a pattern, or by their name within a block."""
    dynamic = Patterns(source, "dynamic")
    for pattern in _mapping(source.values, "dynamic"):
        if not pattern.startswith(gptq.WITHOUT):
            entry = REGEX + pattern.removeprefix(gptq.WITH)
            yield PatternEntry("dynamic", pattern, _meaning(entry, dynamic))
    anywhere = Patterns(source, "extra_config", anywhere=True)
    for pattern, rule in _mapping(source.values, "extra_config").items():
        if not auto_round.SIGNS.isdisjoint(pattern) and _is_quantized(rule):
            yield PatternEntry("extra_config", pattern, _meaning(REGEX + pattern, anywhere))
    targeting = Patterns(source, "config_groups")
    for key, target in _targets(source):
        if is_regex(target) or target == EMBEDDING:
            yield PatternEntry(key, target, _meaning(target, targeting))
    for entry in source.values.get("modules_in_block_to_quantize") or ():
        for name in [entry] if isinstance(entry, str) else entry:
            yield PatternEntry("modules_in_block_to_quantize", name, _standing_in(name))


def _names(source: FoundConfig) -> Iterator[tuple[str, str]]:
    """Yield (name, key) of every module listed by its full name."""
    for name in _mapping(source.values, "quantized_layers"):
        yield name, "quantized_layers"
    for name, rule in _mapping(source.values, "extra_config").items():
        if auto_round.SIGNS.isdisjoint(name) and _is_quantized(rule):
            yield name, "extra_config"
    for key, target in _targets(source):
        if not is_regex(target) and target not in CLASSES:
            yield target, key
        elif target == LINEAR and _method(source) != MODELOPT:
            yield HEAD, key
    if source.values.get(HEAD) is True:
        yield HEAD, HEAD


def _targets(source: FoundConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, target) of every group with quantized weights."""
    for name, group in _mapping(source.values, "config_groups").items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            continue
        targets = group.get("targets") if group.get("format") != "dense" else None
        for target in targets if isinstance(targets, list) else ():
            if isinstance(target, str) and target:
                yield f"config_groups.{name:.80}", target


def _meaning(entry: str, patterns: Patterns) -> Callable[[str], bool]:
    return lambda module: matches(entry, module, patterns)


def _standing_in(name: str) -> Callable[[str], bool]:
    inside = Exclusions((name,))
    return lambda module: inside.entry(module) is not None


def _is_quantized(rule: Any) -> bool:
    """Return whether a rule of AutoRound quantizes its modules."""
    bits = rule.get("bits") if isinstance(rule, dict) else None
    return not isinstance(bits, int) or bits < auto_round.PLAIN_BITS


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _method(source: FoundConfig) -> str:
    return str(source.values.get("quant_method") or "").lower()
