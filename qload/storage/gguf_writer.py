"""Header of a new GGUF file; `gguf_header` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qload.storage.gguf_header import MAGIC, SCALARS, STRING, U32, U64, VERSIONS
from qload.storage.gguf_types import GGML_TYPES

ALIGNMENT_BYTES = 32  # the default of `general.alignment`
NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}


@dataclass(frozen=True)
class Scalar:
    """Value of a key in a type of `SCALARS`."""

    kind: int
    value: float


Value = str | int | float | Scalar


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to the alignment of tensors."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def encode_header(
    keys: Mapping[str, Value], tensors: Mapping[str, tuple[str, tuple[int, ...], int]]
) -> bytes:
    """Encode keys and tensors, padded to the alignment.

    `tensors`: type, shape (outermost first) and offset in the data, by name. An integer becomes u32, and a
    float f32.
    """
    parts = [MAGIC, U32.pack(max(VERSIONS)), U64.pack(len(tensors)), U64.pack(len(keys))]
    for key, value in keys.items():
        parts += [_text(key), _value(value)]
    for name, (kind, shape, offset) in tensors.items():
        parts += [_text(name), U32.pack(len(shape)), *map(U64.pack, reversed(shape))]
        parts += [U32.pack(NUMBERS[kind]), U64.pack(offset)]
    header = b"".join(parts)
    return header.ljust(aligned(len(header)), b"\0")


def _text(text: str) -> bytes:
    content = text.encode()
    return U64.pack(len(content)) + content


def _value(value: Value) -> bytes:
    """Encode type and content of a value."""
    if isinstance(value, str):
        return U32.pack(STRING) + _text(value)
    scalar = value if isinstance(value, Scalar) else Scalar(6 if isinstance(value, float) else 4, value)
    return U32.pack(scalar.kind) + SCALARS[scalar.kind].pack(scalar.value)
