"""Writer of GGUF files for tests: `gguf_file` composes a header and data byte by byte."""

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qload.storage.gguf_types import GGML_TYPES

NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}
Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]  # name -> type, shape (outermost first), data
LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 128,
}


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value_of(value: Any) -> bytes:
    """Return type and content of a value: u32, f32, bool, string, or an array of them."""
    if isinstance(value, bytes):
        return value  # type and content, as the test wants them
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    items = [value_of(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def entry(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """Return the header entry of a tensor."""
    dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def header(keys: Mapping[str, Any], entries: Sequence[bytes], *, version: int = 3) -> bytes:
    """Return a header without padding."""
    listed = b"".join(text(key) + value_of(value) for key, value in keys.items())
    return b"GGUF" + struct.pack("<IQQ", version, len(entries), len(keys)) + listed + b"".join(entries)


def gguf_file(keys: Mapping[str, Any], tensors: Tensors, alignment: int = 32) -> bytes:
    """Return a whole file, with the data of each tensor padded."""
    entries, data = [], b""
    for name, (kind, shape, content) in tensors.items():
        entries.append(entry(name, shape, NUMBERS[kind], len(data)))
        data += content + bytes(-len(content) % alignment)
    head = header(keys, entries)
    return head + bytes(-len(head) % alignment) + data


def floats(values: NDArray[Any]) -> tuple[str, Sequence[int], bytes]:
    """Return a tensor of type F32."""
    return "F32", values.shape, values.astype("<f4").tobytes()


def blocks(kind: str, shape: Sequence[int], seed: int = 0) -> tuple[str, Sequence[int], bytes]:
    """Return a tensor of random blocks; their scales may be NaN."""
    stored = GGML_TYPES[NUMBERS[kind]]
    count = prod(shape) // stored.elements * stored.nbytes
    return kind, shape, np.random.default_rng(seed).integers(0, 256, count, np.uint8).tobytes()
