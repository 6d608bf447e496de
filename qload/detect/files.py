"""Where a checkpoint's quantization config stands, and the JSON of it, as hostile input."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from reprlib import Repr
from typing import Any

from qload.errors import ConfigError, StorageError
from qload.storage import is_directory, is_taken, parse_json, read_whole, snapshot, special, status

MAX_BYTES = 64 << 20  # a config larger than this is not a config
MODEL_CONFIG = "config.json"
SECTIONS = ("quantization_config", "compression_config")
MODELOPT = "hf_quant_config.json"
SIDE_FILES = ("quantize_config.json", "quant_config.json")
SECTION_FILE = "quantization_config.json"  # the section of config.json once more, where it names a method
CONFIGS = (
    MODEL_CONFIG,
    *SIDE_FILES,
    SECTION_FILE,
    MODELOPT,
)  # all that is read beside an index

BESIDE_SECTION = ("rotation_config",)  # AutoRound may write it beside its section

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 60, 60, 60


@dataclass(frozen=True)
class FoundConfig:
    """A quantization config as it stands in a file: where, and what it says."""

    file: str
    section: str  # "quantization_config", "text_config.quantization_config", or "" for the whole file
    values: Mapping[str, Any]

    def key(self, name: str, *others: str) -> str:
        """`bits` -> `quantization_config.bits`; of several spellings the first that the config has."""
        stated = next((each for each in (name, *others) if self.values.get(each) is not None), name)
        return f"{self.section}.{stated}" if self.section else stated


def find_config(path: str | PathLike[str]) -> FoundConfig | None:
    """The config of a checkpoint directory, or of the directory a file lies in; None if there is none."""
    configs = find_configs(path)
    return configs[0] if configs else None


def find_configs(path: str | PathLike[str]) -> list[FoundConfig]:
    """Every quantization config of a checkpoint, the one that counts first.

    `config.json` (`quantization_config`, also inside of `text_config`) counts before
    `quantize_config.json` (GPTQ's own), `quant_config.json` (AWQ's own), `quantization_config.json`
    (AutoRound's, of any method) and `hf_quant_config.json` (ModelOpt's own).
    """
    folder = _folder(path)
    found = _sections(read_model_config(path))
    found += [
        FoundConfig(name, "", read_json(folder / name)) for name in SIDE_FILES if _stands(folder / name)
    ]
    if _stands(folder / SECTION_FILE):
        values = read_json(folder / SECTION_FILE)
        found += [FoundConfig(SECTION_FILE, "", values)] if "quant_method" in values else []
    return found + _modelopt(folder, alone=not found)


def _modelopt(folder: Path, alone: bool) -> list[FoundConfig]:
    """ModelOpt's own file, which counts where there is no other."""
    if not _stands(folder / MODELOPT):
        return []
    values = read_json(folder / MODELOPT).get("quantization")
    if not isinstance(values, dict):
        if not alone:
            return []
        raise ConfigError(MODELOPT, "quantization", "an object", shown(values))
    return [FoundConfig(MODELOPT, "quantization", {"quant_method": "modelopt", **values})]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError for anything else, StorageError where it cannot be read."""
    found = status(path, path.name)
    if found is None or special(found):
        got = special(found) if found else "a link to nothing"
        raise ConfigError(path.name, "file", "a file", got or "")
    if found.st_size > MAX_BYTES:
        raise ConfigError(path.name, "size", f"at most {MAX_BYTES} bytes", str(found.st_size))
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
    """The `config.json` of a checkpoint, whole; empty if there is none."""
    file = _folder(path) / MODEL_CONFIG
    return read_json(file) if _stands(file) else {}


def _stands(path: Path) -> bool:
    """Whether a name is taken, be it by a broken link: what cannot be read is not what is not there."""
    return is_taken(path, path.name)


def _folder(path: str | PathLike[str]) -> Path:
    place = Path(snapshot(path))
    return place if is_directory(place) else place.parent


def _sections(config: Mapping[str, Any]) -> list[FoundConfig]:
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise ConfigError(MODEL_CONFIG, "text_config", "an object", type(text).__name__)
    places = [("", config), ("text_config.", text or {})]
    found = []
    for lead, holder in places:
        for section in SECTIONS:
            values = holder.get(section)
            if values is None:
                continue
            if not isinstance(values, dict):
                raise ConfigError(
                    MODEL_CONFIG, lead + section, "an object", f"{type(values).__name__} {shown(values)}"
                )
            beside = {key: config[key] for key in BESIDE_SECTION if config.get(key) and key not in values}
            found.append(FoundConfig(MODEL_CONFIG, lead + section, {**values, **beside}))
    if len(found) > 1 and any(other.values != found[0].values for other in found[1:]):
        raise ConfigError(
            MODEL_CONFIG, found[1].section, f"the same as {found[0].section}", "another quantization config"
        )
    return found[:1]


def shown(value: Any) -> str:
    """A value as an error shows it: short, however long or deep it is."""
    return "nothing" if value is None else f"{_SHORT.repr(value):.60}"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
