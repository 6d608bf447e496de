"""Cases that no reader may accept: each says something that its tensors contradict."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qload.testing.vectors.case import LAYER, Content
from qload.testing.vectors.valid import GROUP, K, gptq

TYPES = {torch.int32: "I32", torch.float16: "F16"}


def cases() -> Iterator[Content]:
    """One change each of a sound GPTQ layer."""
    sound = gptq("gptq.v1.w4.g32", (), "")
    held = sound.tensors
    yield _of(
        sound, "cut-in-a-group", "shares", "Three ranks: a group would be cut in two.", split="K", world=3
    )
    yield _of(
        sound, "orphan-scales", "missing-tensor", "Scales and zero points without codes.", drop=("qweight",)
    )
    yield _of(sound, "no-scales", "missing-tensor", "Codes without scales.", drop=("scales",))
    yield _of(
        sound, "scales-of-other-shape", "shape", "One group of scales too few.", scales=held["scales"][:-1]
    )
    yield _of(sound, "scales-transposed", "shape", "Scales stored as (N, G).", scales=held["scales"].T)
    yield _of(
        sound, "scale-nan", "value", "A scale that is no number.", scales=_with(held["scales"], torch.nan)
    )
    yield _of(
        sound,
        "index-past-the-end",
        "act-order",
        "g_idx names a group that is not there.",
        g_idx=_with(held["g_idx"], K // GROUP),
    )
    yield _of(sound, "index-negative", "act-order", "g_idx names group -1.", g_idx=_with(held["g_idx"], -1))
    yield _of(sound, "words-of-floats", "dtype", "Codes stored as float16.", qweight=held["qweight"].half())
    yield from _lying(sound)
    yield _raw(sound, "duplicate-tensor", "duplicate-key", "One name twice in the header.", _duplicate(held))
    yield _raw(sound, "offsets-overlap", "file", "Two tensors share bytes.", _overlapping(held))
    yield _raw(sound, "file-cut-short", "file", "The last bytes are missing.", _file(held)[:-16])


def _lying(sound: Content) -> Iterator[Content]:
    """Configs that say something else than the tensors."""
    yield replace(
        _of(
            sound, "config-of-another-method", "lying-config", "The config says AWQ, the tensors are GPTQ's."
        ),
        config={"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    )
    yield replace(
        _of(sound, "config-of-other-groups", "lying-config", "The config says groups of 64, g_idx says 32."),
        config={**sound.config, "group_size": 2 * GROUP},
    )


def _of(
    sound: Content,
    name: str,
    flag: str,
    comment: str,
    *,
    drop: tuple[str, ...] = (),
    split: Any = None,
    world: int = 1,
    **tensors: Tensor,
) -> Content:
    held = {key: tensor for key, tensor in {**sound.tensors, **tensors}.items() if key not in drop}
    return replace(
        sound,
        id=f"reject.{name}",
        flags=(flag,),
        comment=comment,
        tensors=held,
        expected=None,
        split=split,
        world=world,
    )


def _raw(sound: Content, name: str, flag: str, comment: str, file: bytes) -> Content:
    return replace(_of(sound, name, flag, comment), raw={"model.safetensors": file})


def _with(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[-1] = value
    return changed


def _entries(held: dict[str, Tensor]) -> tuple[list[tuple[str, dict[str, Any]]], bytes]:
    """The header's entries, in the order of their bytes, and these."""
    entries, data = [], b""
    for name, tensor in held.items():
        content = tensor.contiguous().numpy().tobytes()
        entry = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        entries.append((f"{LAYER}.{name}", entry))
        data += content
    return entries, data


def _written(entries: list[tuple[str, dict[str, Any]]], data: bytes) -> bytes:
    """A file, whatever its entries say; names may stand twice."""
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries) + "}"
    header = text.encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def _file(held: dict[str, Tensor]) -> bytes:
    return _written(*_entries(held))


def _duplicate(held: dict[str, Tensor]) -> bytes:
    entries, data = _entries(held)
    name, entry = entries[-1]
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    again = {**entry, "data_offsets": [len(data), len(data) + size]}
    return _written([*entries, (name, again)], data + bytes(size))


def _overlapping(held: dict[str, Tensor]) -> bytes:
    entries, data = _entries(held)
    start, stop = entries[1][1]["data_offsets"]
    entries[1][1]["data_offsets"] = [start - 16, stop - 16]
    return _written(entries, data)
