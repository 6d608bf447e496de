"""A tensor in pieces that fit in little memory, however large it is."""

from collections.abc import Iterator

from torch import Tensor

from qload.storage.protocol import WeightStorage

ROWS = 1 << 16  # elements of a run of rows: small, so that who stops at the first has read little


def rows(storage: WeightStorage, name: str) -> Iterator[tuple[int, Tensor]]:
    """A tensor in runs of whole rows (of its first dimension): (first row, the run)."""
    shape = storage.info(name).shape
    if not shape:
        yield 0, storage.read(name).reshape(1)
        return
    width = max(1, storage.info(name).nbytes // max(1, shape[0]) // storage.info(name).dtype.itemsize)
    step = max(1, ROWS // width)
    for start in range(0, shape[0], step):
        yield start, storage.read(name, (slice(start, min(start + step, shape[0])),))
