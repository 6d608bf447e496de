"""Snapshots of tensors by content, for syrupy: a mismatch says which rows and columns moved.

Of a tensor a snapshot holds dtype, shape, a digest, its first numbers, and a digest of each band of rows and
of columns, at most 64 of either: one element that moved is where a row and a column differ.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from syrupy.extensions.amber import AmberSnapshotExtension
from torch import Tensor

HEAD, BANDS = 8, 64


class TensorSnapshot(AmberSnapshotExtension):
    """Syrupy's own files, with tensors in them by content: `snapshot.use_extension(TensorSnapshot)`."""

    def serialize(self, data: Any, **options: Any) -> Any:
        """The text of `data`, tensors within it by content; `options`: syrupy's."""
        return super().serialize(_by_content(data), **options)

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        """First what moved, then the lines that differ, of `serialized_data` and `snapshot_data`."""
        yield from moved(str(snapshot_data), str(serialized_data))
        yield from super().diff_lines(serialized_data, snapshot_data)


def by_content(tensor: Tensor) -> str:
    """A `tensor` as lines of text that tell it from every other, and where."""
    plain = tensor.detach().cpu().contiguous()
    rows = plain.reshape(-1, plain.shape[-1] if plain.ndim else 1)
    bytes_ = rows.view(torch.uint8).reshape(*rows.shape, rows.element_size())
    head = " ".join(str(number) for number in plain.reshape(-1)[:HEAD].tolist())
    return "\n".join(
        (
            f"{plain.dtype} {tuple(plain.shape)}",
            f"sha256 {_digest(bytes_, 64)}",
            f"begins {head}{' ...' if plain.numel() > HEAD else ''}",
            f"rows {_bands(bytes_)}",
            f"columns {_bands(bytes_.transpose(0, 1))}",
        )
    )


def moved(before: str, after: str) -> Iterator[str]:
    """What changed between two snapshots, a line for each tensor that did."""
    pairs = zip(_PATTERN.finditer(before), _PATTERN.finditer(after), strict=False)
    for number, (was, now) in enumerate(pairs):
        name = f"tensor {number}"
        if was["kind"] != now["kind"]:
            yield f"{name}: was {was['kind']}, is {now['kind']}"
        elif was["digest"] != now["digest"]:
            rows, columns = (_ranges(was[axis], now[axis]) for axis in ("rows", "columns"))
            yield f"{name}, {now['kind']}: moved in rows {rows}, columns {columns}"


_PATTERN = re.compile(
    r"(?P<kind>torch\.\w+ \([\d, ]*\))\s+sha256 (?P<digest>\w+)\s+begins [^\n]*\s+rows (?P<rows>[^\n]*)\s+"
    r"columns (?P<columns>[^\n]*)"
)


def _by_content(data: Any) -> Any:
    if isinstance(data, Tensor):
        return by_content(data)
    if isinstance(data, Mapping):
        return {key: _by_content(held) for key, held in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(_by_content(held) for held in data)
    return data


def _bands(bytes_: Tensor) -> str:
    """How many rows a band has, and the digests of all: `2: 1f0a 77b2`."""
    count = bytes_.shape[0]
    size = max(1, -(-count // BANDS))
    return f"{size}: " + " ".join(_digest(bytes_[at : at + size], 8) for at in range(0, count, size))


def _digest(bytes_: Tensor, length: int) -> str:
    return hashlib.sha256(bytes_.contiguous().numpy().tobytes()).hexdigest()[:length]


def _ranges(was: str, now: str) -> str:
    """Of bands that differ the first and the last row."""
    size = int(now.partition(":")[0])
    pairs = zip(was.split()[1:], now.split()[1:], strict=True)
    apart = [at for at, (one, other) in enumerate(pairs) if one != other]
    first, last = apart[0] * size, (apart[-1] + 1) * size - 1
    return f"{first}" if first == last else f"{first} to {last}"
