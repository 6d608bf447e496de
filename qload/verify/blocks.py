"""Bounded reads of tensors and layers: rows as floats, flat pieces, and blocks of outputs.

A block of few outputs is a few bytes of each row if outputs are the last stored axis, with one read for each
row. `WindowSource` reads a wider window at once and cuts blocks from memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

from qload.formats.unquantized import FLOATS
from qload.lazy_torch import Tensor, torch
from qload.loader import FormatLoader, LayerDescription, Part
from qload.loader.sharding import granule
from qload.loader.source import TensorSource, WrappedSource
from qload.spec import Role, TensorSpec, Weight
from qload.storage import TensorInfo, WeightStorage, rows
from qload.weights import Weights

MAX_ELEMENTS = 1 << 20  # of a dequantized block; with its working copies about 32 MiB
MAX_PIECE_BYTES = 1 << 20
BLOCK_BYTES = 256  # pieces end at multiples of it, if rows allow it
MAX_WINDOW_BYTES = 1 << 23  # bytes of a tensor in memory, unless one read asks for more


def read_float_rows(
    storage: WeightStorage, name: str, spec: TensorSpec | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield rows of a tensor as comparable floats; nothing for integers.

    Bytes declared as exponents are E8M0 floats; of codes with scales among their bytes, these are yielded.
    """
    dtype = storage.info(name).stored_dtype
    exponents = spec is not None and spec.is_exponents
    scale_bytes = None if spec is None else spec.scale_bytes
    if not dtype.is_floating_point and not exponents and scale_bytes is None:
        return
    for start, run in rows(storage, name):
        if scale_bytes is not None:
            yield start, scale_bytes.of(run)
            continue
        floats = run.view(torch.float8_e8m0fnu) if exponents else run
        yield start, floats if dtype in FLOATS else floats.float()


def find_wrong(
    runs: Iterable[tuple[int, Tensor, Tensor]],
) -> tuple[int, tuple[int, ...], float] | None:
    """Return the number of wrong values in runs of rows, and place and value of the first; None without one.

    `runs`: the number of the first row, the values of the rows, and a mask of the wrong ones.
    """
    count, first = 0, None
    for start, values, wrong in runs:
        places = torch.nonzero(wrong)
        if places.numel() and first is None:
            row, *rest = places[0].tolist()
            first = (start + row, *rest), float(values[(row, *rest)])
        count += places.shape[0]
    return (count, *first) if first else None


def pieces(storage: WeightStorage, name: str) -> Iterator[Tensor]:
    """Yield all elements in the order of the file: one-dimensional, MAX_PIECE_BYTES each at most."""
    info = storage.info(name)
    if 0 in info.shape:
        return
    if not info.shape:
        yield storage.read(name).reshape(1)
        return
    size = info.dtype.itemsize
    cut = next(at for at in range(len(info.shape)) if prod(info.shape[at + 1 :]) * size <= MAX_PIECE_BYTES)
    width = prod(info.shape[cut + 1 :]) * size
    rows_per_block = BLOCK_BYTES // gcd(BLOCK_BYTES, width)
    step = MAX_PIECE_BYTES // width // rows_per_block * rows_per_block or MAX_PIECE_BYTES // width
    for outer in product(*map(range, info.shape[:cut])):
        lead = tuple(slice(at, at + 1) for at in outer)
        for start in range(0, info.shape[cut], step):
            stop = min(start + step, info.shape[cut])
            yield storage.read(name, (*lead, slice(start, stop))).reshape(-1)


def read_span(storage: WeightStorage, name: str, first: int, count: int) -> Tensor:
    """Return the bytes from `first` on, `count` or as many as the tensor has."""
    spans, at = [], 0
    for piece in pieces(storage, name):
        data = piece.view(torch.uint8)
        if at + len(data) > first and at < first + count:
            spans.append(data[max(0, first - at) : first + count - at])
        at += len(data)
        if at >= first + count:
            break
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.uint8)


def load_output_blocks(
    weights: Weights, loader: FormatLoader, layer: LayerDescription
) -> Iterator[tuple[int, Weight]]:
    """Yield a layer in blocks of outputs: (first output, typed weight of the block)."""
    block = granule(layer, "N") or layer.N
    step = max(1, MAX_ELEMENTS // max(1, layer.K) // block) * block
    source = WindowSource(weights)
    for start in range(0, layer.N, step):
        part = Part(layer.prefix, start, min(start + step, layer.N))
        yield start, loader.load(source, [part], None)


@dataclass(frozen=True)
class Window:
    """Part of a tensor in memory: along an axis from `start` to `stop`."""

    axis: int
    start: int
    stop: int
    values: Tensor

    def part(self, axis: int, wanted: slice) -> Tensor | None:
        """Return a copy of a slice along this axis; None if the window does not cover it."""
        if axis != self.axis or not self.start <= wanted.start <= wanted.stop <= self.stop:
            return None
        if (self.start, self.stop) == (wanted.start, wanted.stop):
            return self.values
        return self.values.narrow(axis, wanted.start - self.start, wanted.stop - wanted.start).contiguous()


class WindowSource(WrappedSource):
    """Source of an inner source's tensors that keeps a window of tensors sliced along a later axis.

    For one thread, which does not write to the tensors.
    """

    def __init__(self, inner: TensorSource) -> None:
        super().__init__(inner)
        self._windows: dict[str, Window] = {}

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """Read as the inner source does, with at most MAX_WINDOW_BYTES beyond the slice."""
        info = self.inner.info(name)
        cut = [
            axis
            for axis, (part, size) in enumerate(zip(index, info.shape, strict=False))
            if part.indices(size)[:2] != (0, size)
        ]
        if len(cut) != 1 or not cut[0] or not info.nbytes:
            return self.inner.read(name, index, role=role)
        (axis,) = cut
        window = self._windows.get(name)
        part = None if window is None else window.part(axis, index[axis])
        if part is None:
            self._windows.pop(name, None)  # free it before the next one is read
            window = self._windows[name] = self._read_window(name, info, axis, index, role)
            part = window.part(axis, index[axis])
        assert part is not None
        return part

    def _read_window(
        self, name: str, info: TensorInfo, axis: int, index: tuple[slice, ...], role: Role
    ) -> Window:
        """Read from the start of the slice on, as much as a window may have."""
        size, start = info.shape[axis], index[axis].start
        stop = min(size, max(index[axis].stop, start + MAX_WINDOW_BYTES * size // info.nbytes))
        wide = (*index[:axis], slice(start, stop), *index[axis + 1 :])
        return Window(axis, start, stop, self.inner.read(name, wide, role=role))
