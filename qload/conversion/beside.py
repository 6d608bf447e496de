"""What stands beside the tensors of a checkpoint: its config with another section, and copies of the rest."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from qload.conversion.sections import WrittenConfig
from qload.detect.files import CONFIGS, MODEL_CONFIG, SECTIONS, FoundConfig
from qload.storage.files import special, status

MOST = 1 << 30  # bytes of a file that is copied; tokenizers have some 30 MB
TENSORS = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
)
CERTIFICATE = "qload-certificate.json"


def config_files(
    model_config: Mapping[str, Any], found: FoundConfig | None, section: WrittenConfig
) -> Iterator[tuple[str, bytes]]:
    """The names and the contents of the configs: that of the model, and the owner's own file."""
    config: dict[str, Any] = deepcopy(dict(model_config))
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in SECTIONS:
            holder.pop(key, None)
    if section.values is not None:
        nested = found is not None and found.file == MODEL_CONFIG and found.section.startswith("text_config.")
        (config["text_config"] if nested else config)[SECTIONS[0]] = dict(section.values)
    if config:
        yield MODEL_CONFIG, dumped(config)
    if section.side_file is not None:
        yield section.side_file, dumped(dict(section.values or {}))


def copied_files(folder: Path) -> Iterator[Path]:
    """The files of a folder that hold no tensors and say nothing of how these are stored."""
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.startswith(".") or name.endswith(TENSORS) or name in (*CONFIGS, CERTIFICATE):
            continue
        found = status(path, name)
        if found is not None and not special(found) and found.st_size <= MOST and path.is_file():
            yield path


def dumped(value: Mapping[str, Any]) -> bytes:
    """As JSON, as transformers indents it."""
    return (json.dumps(value, indent=2) + "\n").encode()
