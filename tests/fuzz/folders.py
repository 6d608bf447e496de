"""Whole folders broken at random: files, links, indices, configs and headers that contradict each other.

Whatever comes of it, nothing but qload's errors is raised, `verify` reports what loading refuses in the same
words, and what either says can be written out.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.errors import QloadError
from qload.verify import inspect, verify
from qload.verify.report import finding_of
from tests.verify.checkpoints import GPTQ, gptq, plain

Files = dict[str, bytes]
INDEX = "model.safetensors.index.json"
CONFIGS = ("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")
NAMES = (
    "model.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    "model-00000-of-00002.safetensors", "model-00003-of-00003.safetensors", "consolidated.safetensors",
    "model.fp16.safetensors", "adapter_model.safetensors", INDEX, "other.safetensors.index.json",
    "model.bin", "x" * 240 + ".safetensors", "\udcff.safetensors", *CONFIGS,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    3,
    4,
    8,
    1 << 40,
    1 << 61,
    10**30,
    1.5,
    float("nan"),
    "",
    "x",
    "....",
    "x" * 5000,
    "\ud800",
    "gptq",
    "awq",
    "F32",
    "I32",
    "../model.safetensors",
    "/dev/zero",
    "a.weight",
    "b.qweight",
    [],
    {},
    [0],
    [1] * 64,
    [1 << 61, 0],
    [0, 1 << 62],
    {"a": {"b": [1]}},
    *NAMES,
)
TOKENS = (b"", b'"', b"{", b"}", b"[" * 3000, b",", b'"a":', b"\\ud800", b"\xff", b"\0", b"9" * 5000, b"NaN")


def plain_files() -> Files:
    return {"model.safetensors": save(plain("a.weight", "b.weight"))}


def gptq_files() -> Files:
    config = {"quantization_config": GPTQ, "num_hidden_layers": 2}
    return {
        "model.safetensors": save({**gptq("layers.0.up"), **gptq("layers.1.up")}),
        "config.json": json.dumps(config).encode(),
        "quantize_config.json": json.dumps(GPTQ).encode(),
    }


def sharded_files() -> Files:
    """Two numbered files and their index."""
    first, second = {**gptq("b"), **plain("a.weight")}, {**gptq("c"), **plain("d.weight")}
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {name: file for file, held in zip(names, (first, second), strict=True) for name in held}
    index = {"metadata": {"total_size": 1024}, "weight_map": weight_map}
    config = json.dumps({"quantization_config": GPTQ}).encode()
    files = dict(zip(names, map(save, (first, second)), strict=True))
    return {**files, INDEX: json.dumps(index).encode(), "config.json": config}


def fp8_files() -> Files:
    tensors: dict[str, Tensor] = {
        "a.weight": torch.ones(16, 16).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(1),
        "norm.weight": torch.ones(16),
    }
    section = {"quant_method": "modelopt", "quant_algo": "FP8"}
    own = {"producer": {}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["norm"]}}
    return {
        "model.safetensors": save(tensors),
        "config.json": json.dumps({"quantization_config": section}).encode(),
        "hf_quant_config.json": json.dumps(own).encode(),
    }


SEEDS = (plain_files(), gptq_files(), sharded_files(), fp8_files())


def broken_files(chance: random.Random) -> Files:
    """The files of a sound folder, with a few of them changed, lost, copied or renamed."""
    files = dict(chance.choice(SEEDS))
    for _ in range(chance.choice((1, 1, 2, 3))):
        if files:
            chance.choice(CHANGES)(files, chance.choice(sorted(files)), chance)
    return files


def _lose(files: Files, name: str, chance: random.Random) -> None:
    del files[name]


def _rename(files: Files, name: str, chance: random.Random) -> None:
    files[chance.choice(NAMES)] = files.pop(name)


def _copy(files: Files, name: str, chance: random.Random) -> None:
    files[chance.choice(NAMES)] = files[name]


def _cut(files: Files, name: str, chance: random.Random) -> None:
    files[name] = files[name][: chance.randrange(len(files[name]) + 1)]


def _splice(files: Files, name: str, chance: random.Random) -> None:
    """A few bytes in the first thousand, where headers and keys are, or of a header's length."""
    at = chance.randrange(min(1000, len(files[name]) + 1))
    token = chance.choice(TOKENS) if chance.random() < 0.5 else bytes([chance.randrange(256)])
    files[name] = files[name][:at] + token + files[name][at + chance.choice((0, 1, len(token))) :]


def _edit(files: Files, name: str, chance: random.Random) -> None:
    """The JSON of a config, an index or a header, with a key or a value that is another."""
    content = files[name]
    length = int.from_bytes(content[:8], "little") if name.endswith(".safetensors") else None
    try:
        value = json.loads(content if length is None else content[8 : 8 + length])
    except (ValueError, RecursionError):
        return _splice(files, name, chance)
    text = _other(value, chance).encode()
    files[name] = text if length is None else len(text).to_bytes(8, "little") + text + content[8 + length :]
    return None


def _other(value: Any, chance: random.Random) -> str:
    holders = [value] if isinstance(value, dict | list) and value else []
    for holder in holders:  # which grows
        held = holder.values() if isinstance(holder, dict) else holder
        holders += [one for one in held if isinstance(one, dict | list) and one]
    if not holders:
        return json.dumps(chance.choice(VALUES))
    holder = chance.choice(holders)
    key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    how = chance.randrange(4) if isinstance(holder, dict) else 0
    if how == 0:
        holder[key] = chance.choice(VALUES)
    elif how == 1:
        del holder[key]
    else:
        name = chance.choice(VALUES)
        holder[name if isinstance(name, str) else "TWICE"] = holder[key] if how == 2 else holder.pop(key)
    return json.dumps(value).replace('"TWICE"', json.dumps(key))


CHANGES: tuple[Callable[[Files, str, random.Random], None], ...] = (
    _lose, _rename, _copy, _cut, _splice, _edit, _edit, _edit, _edit,
)  # fmt: skip


def write(files: Files, folder: Path, chance: random.Random) -> None:
    """The folder, afresh; now and then with something else than a file of one of its names."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if chance.random() < 0.2:
        place = folder / chance.choice([*files, *NAMES])
        place.unlink(missing_ok=True)
        chance.choice(STRANGERS)(place)


STRANGERS: tuple[Callable[[Path], None], ...] = (
    Path.mkdir,
    os.mkfifo,
    lambda place: place.symlink_to("/dev/zero"),
    lambda place: place.symlink_to("/dev/full"),
    lambda place: place.symlink_to(place.name),
    lambda place: place.symlink_to("nothing"),
    lambda place: place.symlink_to("."),
    lambda place: place.symlink_to("/proc/self/mem"),
    lambda place: place.symlink_to("/proc/self/status"),
    lambda place: place.symlink_to("x" * 4000),
)


def try_one(chance: random.Random, folder: Path) -> bool:
    """Whether a broken folder opens; raises whatever is not as it should be."""
    write(broken_files(chance), folder, chance)
    path = folder if chance.random() < 0.8 else folder / chance.choice(NAMES)
    reports = [inspect(path), verify(path, tp=2)]
    for report in reports:
        json.dumps(report.to_json(), ensure_ascii=False).encode("utf-8", "surrogateescape")
    refused = _load(path, [layer.prefix for layer in reports[0].layers])
    for report in reports:
        opens = report.verdict not in ("unreadable", "unsupported")
        assert opens == (refused is None), (refused, report)
        assert refused is None or finding_of(refused) in report.findings, (refused, report)
    return refused is None


def _load(path: Path, prefixes: list[str]) -> QloadError | None:
    """Why a checkpoint does not open; what is wrong with single layers is theirs."""
    try:
        with open_checkpoint(path) as weights:
            for prefix in prefixes:
                with suppress(QloadError):
                    weights.get_weights(prefix).dequantize()
    except QloadError as error:
        return error
    return None
