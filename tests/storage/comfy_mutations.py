"""Mutated files of ComfyUI: `python -m tests.fuzz 0 20000` tries many of them.

Each is a small valid file, with words changed in its header, its metadata or the mark of a layer. For every
file, opening and reading raise only errors of qload.
"""

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.errors import QloadError
from qload.storage.comfy import COMFY_METADATA, MARK, SCALED_FP8

F8, E8 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SETTINGS = ("format", "group_size", "convrot", "convrot_groupsize", "params", "num_experts", "layers")
TOKENS = (
    "-1", "0", "1", "2", "3", "4", "16", "64", "256", "1e3", "true", "null", "NaN", "[]", "{}", '""',
    "9" * 30, "4611686018427387904", '"nvfp4"', '"mxfp8"', '"asym_w4a8_int8"', '"awq_w4a16"',
    '"svdquant_w4a4"', '"F8_E4M3"', '"U8"', '"I8"', '"F32"', '":', ",", "}", "[" * 500, "\\\\ud800",
    *(f'"{name}":' for name in SETTINGS),
)  # fmt: skip


@cache
def layers() -> dict[str, tuple[dict[str, object], dict[str, Tensor]]]:
    """Return the mark and the tensors of a layer of each format; codes and scales are small numbers."""
    codes, packed = torch.ones(2, 32, dtype=torch.int8), torch.ones(2, 16, dtype=torch.int8)
    scales, one = torch.ones(2), torch.tensor(0.5)
    tiles = torch.full((128, 4), 56, dtype=torch.uint8)
    turned = {"convrot": True, "convrot_groupsize": 4}
    return {
        "float8_e4m3fn": ({}, {"weight": codes.view(torch.uint8).view(F8), "weight_scale": one}),
        "nvfp4": ({}, {"weight": packed.view(torch.uint8), "weight_scale": tiles, "weight_scale_2": one}),
        "mxfp8": ({}, {"weight": codes.view(torch.uint8).view(F8), "weight_scale": tiles.view(E8)}),
        "int8_tensorwise": (turned, {"weight": codes, "weight_scale": scales}),
        "convrot_w4a4": (turned, {"weight": packed, "weight_scale": scales}),
        "asym_w4a8_int8": (
            {"group_size": 16, "params": {"convrot_groupsize": 4}},
            {"weight": packed, "weight_s_rel": torch.ones(2, 2).to(F8), "weight_s_channel": scales},
        ),
        "awq_w4a16": (
            {},
            {"weight": packed, "weight_scale": torch.ones(2, 2), "weight_zeros": torch.ones(2, 2)},
        ),
    }


@cache
def seeds() -> tuple[tuple[bytes, bytes], ...]:
    """Return header and data of three files: marks as tensors, marks in metadata, an older mark."""
    tensors, marks = {}, {}
    for name, (settings, parts) in layers().items():
        tensors.update({f"{name}.{part}": value.clone() for part, value in parts.items()})
        marks[name] = {"format": name, **settings}
    stored = {
        f"{name}.{MARK}": torch.tensor([*json.dumps(mark).encode()], dtype=torch.uint8)
        for name, mark in marks.items()
    }
    older = {
        "a.weight": torch.ones(2, 4).to(F8),
        "a.scale_weight": torch.ones(1),
        SCALED_FP8: torch.zeros(2).to(F8),
    }
    files = (
        save(tensors | stored),
        save(tensors, {COMFY_METADATA: json.dumps({"layers": marks})}),
        save(older),
    )
    ends = [8 + int.from_bytes(file[:8], "little") for file in files]
    return tuple((file[8:end], file[end:]) for file, end in zip(files, ends, strict=True))


def _change(text: bytes, chance: random.Random) -> bytes:
    """Replace a few characters by a token or by one character."""
    at = chance.randrange(len(text) + 1)
    to = min(len(text), at + chance.choice((0, 1, 1, 2, 4, 12)))
    token = chance.choice(TOKENS) if chance.random() < 0.6 else chr(chance.randrange(32, 300))
    return text[:at] + token.encode() + text[to:]


def comfy_mutations(count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield `count` files, reproducible by seed."""
    chance = random.Random(seed)
    for _ in range(count):
        header, data = chance.choice(seeds())
        marks = [name for name in json.loads(header) if name.endswith(MARK)]
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            if marks and chance.random() < 0.5:
                with suppress(ValueError, LookupError, TypeError):  # of a header that is changed already
                    begin, end = json.loads(header)[chance.choice(marks)]["data_offsets"]
                    mark = _change(data[begin:end], chance)[: end - begin].ljust(end - begin)
                    data = data[:begin] + mark + data[end:]
            else:
                header = _change(header, chance)
        yield len(header).to_bytes(8, "little") + header + data


def read_layers(file: bytes) -> list[str]:
    """Open a file, and return the names of its readable layers."""
    read = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(file)
        with open_checkpoint(path) as weights:
            for prefix in (*layers(), "a"):
                with suppress(QloadError):
                    weights.get_weights(prefix).dequantize()
                    read.append(prefix)
    return read


def try_comfy(file: bytes) -> bool:
    """Return whether a file opens; catch only errors of qload."""
    try:
        read_layers(file)
    except QloadError as error:
        str(error).encode("utf-8", "surrogateescape")  # it can be printed
        return False
    return True
