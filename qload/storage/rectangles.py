"""Any rectangle of a tensor in a file, as runs of bytes.

shape (8, 6), elements [2:5, 1:4]    ......    The rows of the rectangle are runs of 3 elements that
                                     .xxx..    begin 6 apart. Where what lies between is short it is
                                     .xxx..    read too, many rows at once, and dropped; else each
                                     .xxx..    run is read alone.
"""

from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from qload.storage.header import Entry
from qload.storage.remote import RangeReader

GAP = 8 << 10  # bytes between two runs, up to which reading them costs less than another call
SCRATCH = 1 << 20  # bytes that are read at once for what is wanted of them

Bounds = tuple[tuple[int, int], ...]


def read_rectangle(
    opened: RangeReader, entry: Entry, pairs: Bounds, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """The bytes of the elements within (start, stop) of every dimension, row major; there is at least one.

    `out`: where they go, as many bytes in one piece.
    """
    size = entry.itemsize
    extents = [stop - start for start, stop in pairs]
    run = np.empty(prod(extents) * size, np.uint8) if out is None else out
    first = in_one_run(entry, pairs)
    if first is not None:
        opened.read_into(run.data, first)
        return run
    cut = last_cut(entry, pairs)
    length = prod(extents[cut:]) * size  # of a run: all dimensions after the last one that is cut
    strides = [prod(entry.shape[at + 1 :]) * size for at in range(len(pairs))]
    first = entry.begin + sum(start * stride for (start, _), stride in zip(pairs, strides, strict=True))
    outer, rows = extents[: cut - 1], extents[cut - 1]
    blocks = run.reshape(prod(outer), rows, length)
    for block, place in zip(blocks, product(*map(range, outer)), strict=True):
        at = first + sum(index * stride for index, stride in zip(place, strides, strict=False))
        _read_rows(opened, at, strides[cut - 1], block)
    return run


def last_cut(entry: Entry, pairs: Bounds) -> int:
    """The last dimension of which not all is wanted; 0 where all is."""
    cut = 0
    for at, (start, stop) in enumerate(pairs):
        if stop - start != entry.shape[at]:
            cut = at
    return cut


def in_one_run(entry: Entry, pairs: Bounds) -> int | None:
    """Where the elements begin in the file; None where something else lies between them."""
    if last_cut(entry, pairs):
        return None
    row = prod(entry.shape[1:]) * entry.itemsize
    return entry.begin + (pairs[0][0] * row if pairs else 0)


def _read_rows(opened: RangeReader, at: int, stride: int, block: NDArray[np.uint8]) -> None:
    """Fill (rows, length) with runs that begin `stride` bytes apart."""
    rows, length = block.shape
    if stride - length > GAP:
        for row in block:
            opened.read_into(row.data, at)
            at += stride
        return
    step = min(rows, max(1, SCRATCH // stride))
    scratch = np.empty((step, stride), np.uint8)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        span = (count - 1) * stride + length  # and not to the end of the last row, which may end the file
        opened.read_into(scratch.reshape(-1)[:span].data, at + first * stride)
        block[first : first + count] = scratch[:count, :length]
