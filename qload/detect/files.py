"""Configs of a checkpoint as hostile input: find and read the model config and the quantization configs."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from qload.configs import FoundConfig, value_text
from qload.errors import ConfigError, StorageError
from qload.storage import is_directory, is_taken, parse_json, read_whole, snapshot, special, status

MAX_BYTES = 64 << 20  # size of a config
MODEL_CONFIG = "config.json"
SECTIONS = ("quantization_config", "compression_config")
MODELOPT = "hf_quant_config.json"
SIDE_FILES = ("quantize_config.json", "quant_config.json")
SECTION_FILE = "quantization_config.json"  # a copy of the section of config.json, if it names a method
CONFIGS = (MODEL_CONFIG, *SIDE_FILES, SECTION_FILE, MODELOPT)  # all JSON files read, except indices

OUTER_KEYS = ("rotation_config",)  # keys that AutoRound may write outside of its section


def read_configs(path: str | PathLike[str]) -> tuple[dict[str, Any], list[FoundConfig]]:
    """Read the `config.json` of a checkpoint, and all quantization configs in order of precedence.

    `config.json` (`quantization_config`, also within `text_config`) precedes `quantize_config.json` (GPTQ),
    `quant_config.json` (AWQ), `quantization_config.json` (AutoRound, any method) and `hf_quant_config.json`
    (ModelOpt).
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
    return model_config, configs + _modelopt(folder, alone=not configs)


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
            if not isinstance(values, dict):
                got = f"{type(values).__name__} {value_text(values)}"
                raise ConfigError(MODEL_CONFIG, prefix + section, "an object", got)
            outer = {key: config[key] for key in OUTER_KEYS if config.get(key) and key not in values}
            configs.append(FoundConfig(MODEL_CONFIG, prefix + section, {**values, **outer}))
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
