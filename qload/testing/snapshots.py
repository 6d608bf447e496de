"""Snapshots of tensors by content, for syrupy: a mismatch lists the rows and columns that changed.

The snapshot of a tensor has its dtype, shape, digest and first numbers, and the digests of at most 64 bands
of rows and of columns: a changed element is where a changed row and a changed column meet.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from syrupy.extensions.amber import AmberSnapshotExtension
from torch import Tensor

HEAD_NUMBERS, MAX_BANDS = 8, 64


class TensorSnapshot(AmberSnapshotExtension):
    """Syrupy's own file format, with tensors by content: `snapshot.use_extension(TensorSnapshot)`."""

    def serialize(self, data: Any, **options: Any) -> Any:
        """Return the text of `data` with its tensors by content; `options`: syrupy's."""
        return super().serialize(_by_content(data), **options)

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        """Yield the changed rows and columns, then the lines of `serialized_data` and `snapshot_data`."""
        yield from changes(str(snapshot_data), str(serialized_data))
        yield from super().diff_lines(serialized_data, snapshot_data)


def by_content(tensor: Tensor) -> str:
    """Return lines of text that identify the content of a `tensor`, also by rows and columns."""
    plain = tensor.detach().cpu().contiguous()
    rows = plain.reshape(-1, plain.shape[-1] if plain.ndim else 1)
    bytes_ = rows.view(torch.uint8).reshape(*rows.shape, rows.element_size())
    first_numbers = " ".join(str(number) for number in plain.reshape(-1)[:HEAD_NUMBERS].tolist())
    return "\n".join(
        (
            f"{plain.dtype} {tuple(plain.shape)}",
            f"sha256 {_digest(bytes_, 64)}",
            f"begins {first_numbers}{' ...' if plain.numel() > HEAD_NUMBERS else ''}",
            f"rows {_bands(bytes_)}",
            f"columns {_bands(bytes_.transpose(0, 1))}",
        )
    )


def changes(before: str, after: str) -> Iterator[str]:
    """Yield a line for each tensor that differs between two snapshots."""
    pairs = zip(_PATTERN.finditer(before), _PATTERN.finditer(after), strict=False)
    for number, (was, now) in enumerate(pairs):
        name = f"tensor {number}"
        if was["kind"] != now["kind"]:
            yield f"{name}: was {was['kind']}, is {now['kind']}"
        elif was["digest"] != now["digest"]:
            rows, columns = (_changed_range(was[axis], now[axis]) for axis in ("rows", "columns"))
            yield f"{name}, {now['kind']}: moved in rows {rows}, columns {columns}"


_PATTERN = re.compile(
    r"(?P<kind>torch\.\w+ \([\d, ]*\))\s+sha256 (?P<digest>\w+)\s+begins [^\n]*\s+rows (?P<rows>[^\n]*)\s+"
    r"columns (?P<columns>[^\n]*)"
)


def _by_content(data: Any) -> Any:
    if isinstance(data, Tensor):
        return by_content(data)
    if isinstance(data, Mapping):
        return {key: _by_content(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(_by_content(value) for value in data)
    return data


def _bands(bytes_: Tensor) -> str:
    """The number of rows of a band, and the digests of all bands: `2: 1f0a 77b2`."""
    count = bytes_.shape[0]
    size = max(1, -(-count // MAX_BANDS))
    return f"{size}: " + " ".join(_digest(bytes_[at : at + size], 8) for at in range(0, count, size))


def _digest(bytes_: Tensor, length: int) -> str:
    return hashlib.sha256(bytes_.contiguous().numpy().tobytes()).hexdigest()[:length]


def _changed_range(was: str, now: str) -> str:
    """The first and the last row of the bands that differ."""
    size = int(now.partition(":")[0])
    pairs = zip(was.split()[1:], now.split()[1:], strict=True)
    changed = [at for at, (one, other) in enumerate(pairs) if one != other]
    first, last = changed[0] * size, (changed[-1] + 1) * size - 1
    return f"{first}" if first == last else f"{first} to {last}"
