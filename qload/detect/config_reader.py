"""Reader of config files, and of quantization configs: claims, ignored keys, conflicts, single modules.

A malformed config raises; no value of it becomes a default. `read_claims` calls the reader of the config's
method (`METHODS`).

Keys that qload ignores although their owners act on them: a key that changes the meaning of stored values is
refused; a key that changes other computations, or that only some programs act on, is a note. Settings of the
quantizer, such as `damp_percent` and `iters`, change neither. Sources: gptqmodel 7.7.0, auto-round 0.16.1,
transformers 5.23.0.

Entries that select modules to quantize, by name or by pattern:

    gptq                dynamic (patterns without '-:'), modules_in_block_to_quantize, lm_head: true
    auto-round          extra_config: names and patterns with fewer than 16 bits
    compressed-tensors  config_groups.*.targets; `Linear` means the head as well
    modelopt            quantized_layers, or config_groups.*.targets beside MIXED_PRECISION

Entries that exclude modules are `Exclusions` of the loader.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from qload.configs import Claims, FoundConfig, Patterns, agree, matcher, value_text
from qload.configs.matching import EMBEDDING_CLASS, HEAD, LINEAR_CLASS, MODULE_CLASSES, REGEX_PREFIX, is_regex
from qload.detect.methods import METHODS, auto_round, bitsandbytes, compressed_tensors, gptq
from qload.detect.signatures import METHODS_ELSEWHERE
from qload.errors import ConfigError, ConfigsDisagreeError, QloadError, StorageError, UnsupportedFormatError
from qload.formats import ROLES, mlx
from qload.loader.exclusion import Exclusions, NamedModules
from qload.spec import Role, Weight
from qload.storage import (
    WeightStorage,
    is_directory,
    is_taken,
    parse_json,
    read_whole,
    snapshot,
    special,
    status,
)

MAX_BYTES = 64 << 20  # size of a config
MODEL_CONFIG = "config.json"
MLX_SECTION = "quantization"  # beside a copy of it under the first of the others
SECTIONS = ("quantization_config", "compression_config", MLX_SECTION)
MODELOPT = "hf_quant_config.json"
SIDE_FILES = ("quantize_config.json", "quant_config.json")
SECTION_FILE = "quantization_config.json"  # a copy of the section of config.json, if it names a method
MISTRAL = "params.json"
QUANTO_MAP = "quanto_qmap.json"  # module -> its types of weights and inputs
CONFIGS = (MODEL_CONFIG, *SIDE_FILES, SECTION_FILE, MODELOPT, MISTRAL, QUANTO_MAP)  # without indices

OUTER_KEYS = ("rotation_config",)  # keys that AutoRound may write outside of its section


def read_configs(path: str | PathLike[str]) -> tuple[dict[str, Any], list[FoundConfig]]:
    """Read the `config.json` of a checkpoint, and all quantization configs in order of precedence.

    `config.json` (`quantization_config`, also within `text_config`) precedes `quantize_config.json` (GPTQ),
    `quant_config.json` (AWQ), `quantization_config.json` (AutoRound, any method), `quanto_qmap.json` and
    `hf_quant_config.json` (ModelOpt). Without any of them `params.json` counts (Mistral).
    """
    folder = _folder(path)
    model_config = read_json(folder / MODEL_CONFIG) if is_taken(folder / MODEL_CONFIG, MODEL_CONFIG) else {}
    configs = _sections(model_config)
    for name in SIDE_FILES:
        if is_taken(folder / name, name):
            configs.append(FoundConfig(name, "", read_json(folder / name)))
    if is_taken(folder / SECTION_FILE, SECTION_FILE):
        values = read_json(folder / SECTION_FILE)
        configs += [FoundConfig(SECTION_FILE, "", values)] if "quant_method" in values else []
    if is_taken(folder / QUANTO_MAP, QUANTO_MAP):
        values = {"quant_method": "quanto", "modules": read_json(folder / QUANTO_MAP)}
        configs.append(FoundConfig(QUANTO_MAP, "", values))
    configs += _modelopt(folder, alone=not configs)
    configs = [replace(config, model=model_config) for config in configs]
    return model_config, configs if configs or model_config else _mistral(folder)


def _mistral(folder: Path) -> list[FoundConfig]:
    """Read the quantization of Mistral's own params.json."""
    values = read_json(folder / MISTRAL).get("quantization") if is_taken(folder / MISTRAL, MISTRAL) else None
    if not values:
        return []
    if not isinstance(values, dict):
        raise ConfigError(MISTRAL, "quantization", "an object", value_text(values))
    return [FoundConfig(MISTRAL, "quantization", {"quant_method": "mistral", **values})]


def _modelopt(folder: Path, alone: bool) -> list[FoundConfig]:
    """Read ModelOpt's own file; `alone`: there is no other config, so that it must be valid."""
    if not is_taken(folder / MODELOPT, MODELOPT):
        return []
    values = read_json(folder / MODELOPT).get("quantization")
    if not isinstance(values, dict):
        if not alone:
            return []
        raise ConfigError(MODELOPT, "quantization", "an object", value_text(values))
    return [FoundConfig(MODELOPT, "quantization", {"quant_method": "modelopt", **values})]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ConfigError for other content, StorageError for an unreadable file."""
    info = status(path, path.name)
    if info is None or special(info):
        got = special(info) if info else "a link to nothing"
        raise ConfigError(path.name, "file", "a file", got or "")
    if info.st_size > MAX_BYTES:
        raise ConfigError(path.name, "size", f"at most {MAX_BYTES} bytes", str(info.st_size))
    text = read_whole(path, path.name, MAX_BYTES, "unreadable")
    try:
        value = parse_json(text, path.name, _refuse_constant)
    except StorageError:
        raise
    except (ValueError, RecursionError) as error:
        got = f"{type(error).__name__}: {error!s:.160}"
        raise ConfigError(path.name, "JSON", "a JSON object", got) from error
    if not isinstance(value, dict):
        raise ConfigError(path.name, "JSON", "an object", type(value).__name__)
    return value


def read_model_config(path: str | PathLike[str]) -> dict[str, Any]:
    """Read the `config.json` of a checkpoint; empty without one."""
    file = _folder(path) / MODEL_CONFIG
    return read_json(file) if is_taken(file, MODEL_CONFIG) else {}


def _folder(path: str | PathLike[str]) -> Path:
    folder = Path(snapshot(path))
    return folder if is_directory(folder) else folder.parent


def _sections(config: Mapping[str, Any]) -> list[FoundConfig]:
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise ConfigError(MODEL_CONFIG, "text_config", "an object", type(text).__name__)
    configs = []
    for prefix, parent in (("", config), ("text_config.", text or {})):
        for section in SECTIONS:
            values = parent.get(section)
            if values is None:
                continue
            if section == MLX_SECTION and not (isinstance(values, dict) and mlx.is_section(values)):
                continue  # a key of some other meaning
            if not isinstance(values, dict):
                got = f"{type(values).__name__} {value_text(values)}"
                raise ConfigError(MODEL_CONFIG, prefix + section, "an object", got)
            outer = {key: config[key] for key in OUTER_KEYS if config.get(key) and key not in values}
            found = mlx.with_method({**values, **outer})
            configs.append(FoundConfig(MODEL_CONFIG, prefix + section, found))
    if len(configs) > 1 and any(other.values != configs[0].values for other in configs[1:]):
        raise ConfigError(
            MODEL_CONFIG,
            configs[1].section,
            f"the same as {configs[0].section}",
            "another quantization config",
        )
    return configs[:1]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


ALIASES = {"intel/auto-round": "auto-round"}  # written by versions up to 0.4.7


def supported_variants() -> tuple[str, ...]:
    """Supported methods and their variants in alphabetical order, for messages."""
    return tuple(sorted({variant for method in METHODS.values() for variant in method.variants}))


def described_formats(name: str) -> tuple[type[Weight], ...]:
    """Types of weights that a config of the method `name` can describe."""
    method = METHODS[name]
    return (*method.formats, *(fmt for other in method.others for fmt in METHODS[other].formats))


def ignored_key_notes(source: FoundConfig, name: str) -> Iterator[str]:
    """Yield a note for each ignored key; raise UnsupportedFormatError for one that changes stored values."""
    method = METHODS[name]
    for path, values in _config_and_entries(source, method.module_key):
        for key, ignored in method.ignored.items():
            value = values.get(key)
            if any(type(value) is type(neutral) and value == neutral for neutral in ignored.neutral):
                continue
            key_path = f"{path}.{key}" if path else key
            if ignored.refused:
                reason = f"{source.key(key_path)} of {source.file} {ignored.meaning}"
                raise UnsupportedFormatError(f"{name} with {key}", reason)
            yield f"{source.file} has {key_path[:160]} = {value_text(value)}, which {ignored.meaning}"


def _config_and_entries(source: FoundConfig, module_key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the config and its entries for modules, each with its path."""
    yield "", source.values
    entries = source.values.get(module_key) if module_key else None
    if isinstance(entries, Mapping):
        for entry, values in entries.items():
            if isinstance(values, Mapping):
                yield f"{module_key}.{entry:.80}", values


def read_claims(source: FoundConfig) -> Claims:
    """Read and validate the claims of a config.

    ConfigError names the file, the key, the expected value and the value. UnsupportedFormatError: the method,
    or its variant, is not supported.
    """
    method = _method_name(source)
    method = ALIASES.get(method, method)
    if method not in METHODS:
        reason = f"the quant_method of {source.file} is not supported"
        raise UnsupportedFormatError(method, reason, supported_variants(), METHODS_ELSEWHERE.get(method, ""))
    claims = METHODS[method].read(source)
    if isinstance(claims, str):
        claims = METHODS[claims].read(source)
        assert isinstance(claims, Claims)
    return replace(claims, notes=(*claims.notes, *ignored_key_notes(source, claims.method)))


def _method_name(source: FoundConfig) -> str:
    method = agree(source, "quant_method", "method")
    if method is None and not source.section:
        method = method_of_own_file(source.values)
    # Configs older than the key `quant_method`.
    if method is None and any(key in source.values for key in compressed_tensors.CT_KEYS):
        method = "compressed-tensors"
    if method is None and any(source.values.get(flag) is True for flag in bitsandbytes.FLAGS):
        method = "bitsandbytes"
    if not isinstance(method, str) or not method:
        raise source.error("quant_method", "the name of a quantization method", value_text(method))
    return method


def method_of_own_file(values: Mapping[str, Any]) -> str | None:
    """Infer the method of a tool's file without `quant_method`: AWQ's has `version`, GPTQ's `desc_act`."""
    if any(key in values for key in ("version", "zero_point", "w_bit")):
        return "awq"
    return "gptq" if any(key in values for key in ("desc_act", "sym", "damp_percent")) else None


DECISIVE_SETTINGS = ("method", "bits", "group_size")  # another value of these changes the weights
OTHER_SETTINGS = ("format", "sym", "desc_act")
SETTING_KEYS = {
    "method": ("quant_method", "method"),
    "bits": ("bits", "w_bit"),
    "group_size": ("group_size", "q_group_size"),
}


def compare_configs(
    configs: Sequence[FoundConfig], claims: Claims, storage: WeightStorage
) -> Iterator[ConfigsDisagreeError | str]:
    """Yield an error or a note for each difference between the claims in force and another config.

    A conflict of method, bits or group size is an error if layers of either config are stored. Loading raises
    the first error, `verify` reports all.
    """
    names = storage.keys()
    settled = "gptq_bits" in names  # tensors overrule the first config
    for source in configs[1:]:
        if source.values == configs[0].values and not settled:
            continue
        try:
            other = read_claims(source)
        except QloadError:  # reported as a finding of its own
            continue
        for name in (*DECISIVE_SETTINGS, *OTHER_SETTINGS):
            ours, theirs = getattr(claims, name), getattr(other, name)
            if ours is None or theirs is None or ours == theirs:
                continue
            if name == "method" and agree(source, "quant_method", "method") is None:  # it is a guess
                continue
            if name in DECISIVE_SETTINGS and _has_quantized_tensors(claims, other, storage):
                yield ConfigsDisagreeError(
                    source.file,
                    source.key(*SETTING_KEYS[name]),
                    f"{ours} as in {claims.file}",
                    str(theirs),
                    f"remedy   make {source.file} say what {claims.file} says, or remove it",
                )
            else:
                yield f"{source.file}: {name} is {theirs!r}, {claims.file} says {ours!r} and is believed"


def _has_quantized_tensors(claims: Claims, other: Claims, storage: WeightStorage) -> bool:
    """Return whether a tensor of a quantized layer of either config is stored."""
    if claims.rules or other.rules:  # formats differ by module
        return True
    suffixes = {
        suffix
        for fmt in (*claims.formats, *other.formats)
        for suffix in fmt.suffixes
        if ROLES.get(suffix.rpartition(".")[2], Role.FLOAT) is not Role.FLOAT
    }
    names, endings = storage.keys(), tuple(f".{suffix}" for suffix in suffixes)
    return not suffixes.isdisjoint(names) or any(name.endswith(endings) for name in names)


MODELOPT_METHOD = "modelopt"
EXCLUSION_LISTS = (
    "ignore", "exclude_modules", "ignored_layers", "llm_int8_skip_modules", "modules_to_not_convert",
)  # fmt: skip


@dataclass(frozen=True)
class PatternEntry:
    """Pattern that selects modules to quantize: key, text, and predicate on module names."""

    key: str
    text: str
    means: Callable[[str], bool]


def exclusion_key(source: FoundConfig) -> str:
    """Describe how to exclude a module: by the list in this config, else by the key of its method."""
    listed = next((key for key in EXCLUSION_LISTS if isinstance(source.values.get(key), list)), None)
    method = METHODS.get(_stated_method(source))
    return listed or (method.exclusion_key if method else "modules_to_not_convert")


def named_modules(source: FoundConfig) -> NamedModules:
    """Collect the modules listed by name as quantized."""
    keys: dict[str, str] = {}
    for name, key in _listed_names(source):
        keys.setdefault(name, key)
    return NamedModules(keys, exclusion_key(source))


def pattern_entries(source: FoundConfig) -> Iterator[PatternEntry]:
    """Yield the entries that select modules by a pattern, or by their name within a block."""
    if "dynamic" in source.values:
        patterns = Patterns(source, "dynamic")
        for pattern in _mapping(source.values, "dynamic"):
            if not pattern.startswith(gptq.EXCLUDE_PREFIX):
                entry = REGEX_PREFIX + pattern.removeprefix(gptq.INCLUDE_PREFIX)
                yield PatternEntry("dynamic", pattern, matcher(entry, patterns=patterns))
    if "extra_config" in source.values:
        patterns = Patterns(source, "extra_config", anywhere=True)
        for pattern, rule in _mapping(source.values, "extra_config").items():
            if not auto_round.REGEX_CHARACTERS.isdisjoint(pattern) and _is_quantized(rule):
                selects = matcher(REGEX_PREFIX + pattern, patterns=patterns)
                yield PatternEntry("extra_config", pattern, selects)
    if "config_groups" in source.values:
        patterns = Patterns(source, "config_groups")
        for key, target in _group_targets(source):
            if is_regex(target) or target == EMBEDDING_CLASS:
                yield PatternEntry(key, target, matcher(target, patterns=patterns))
    for entry in source.values.get("modules_in_block_to_quantize") or ():
        for name in [entry] if isinstance(entry, str) else entry:
            yield PatternEntry("modules_in_block_to_quantize", name, _block_matcher(name))


def _listed_names(source: FoundConfig) -> Iterator[tuple[str, str]]:
    """Yield (name, key) of every module listed by its full name."""
    for name in _mapping(source.values, "quantized_layers"):
        yield name, "quantized_layers"
    for name, rule in _mapping(source.values, "extra_config").items():
        if auto_round.REGEX_CHARACTERS.isdisjoint(name) and _is_quantized(rule):
            yield name, "extra_config"
    for key, target in _group_targets(source):
        if not is_regex(target) and target not in MODULE_CLASSES:
            yield target, key
        elif target == LINEAR_CLASS and _stated_method(source) != MODELOPT_METHOD:
            yield HEAD, key
    if source.values.get(HEAD) is True:
        yield HEAD, HEAD


def _group_targets(source: FoundConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, target) of every group with quantized weights."""
    for name, group in _mapping(source.values, "config_groups").items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            continue
        targets = group.get("targets") if group.get("format") != "dense" else None
        for target in targets if isinstance(targets, list) else ():
            if isinstance(target, str) and target:
                yield f"config_groups.{name:.80}", target


def _block_matcher(name: str) -> Callable[[str], bool]:
    """Build the predicate of a name within a block."""
    inside = Exclusions((name,))
    return lambda module: inside.entry(module) is not None


def _is_quantized(rule: Any) -> bool:
    """Return whether a rule of AutoRound quantizes its modules."""
    bits = rule.get("bits") if isinstance(rule, dict) else None
    return not isinstance(bits, int) or bits < auto_round.MIN_PLAIN_BITS


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _stated_method(source: FoundConfig) -> str:
    return str(source.values.get("quant_method") or "").lower()
