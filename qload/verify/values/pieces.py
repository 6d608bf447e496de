"""A tensor from its first byte to its last, in pieces of bounded size."""

from collections.abc import Iterator
from itertools import product
from math import gcd, prod

import torch
from torch import Tensor

from qload.storage import WeightStorage

PIECE = 1 << 20  # bytes
BLOCK = 256  # bytes; where rows allow it, pieces end where blocks do


def pieces(storage: WeightStorage, name: str) -> Iterator[Tensor]:
    """The elements in the order of the file: one-dimensional, PIECE bytes each at most."""
    info = storage.info(name)
    if 0 in info.shape:
        return
    if not info.shape:
        yield storage.read(name).reshape(1)
        return
    size = info.dtype.itemsize
    cut = next(at for at in range(len(info.shape)) if prod(info.shape[at + 1 :]) * size <= PIECE)
    width = prod(info.shape[cut + 1 :]) * size
    whole = BLOCK // gcd(BLOCK, width)
    step = PIECE // width // whole * whole or PIECE // width
    for outer in product(*map(range, info.shape[:cut])):
        lead = tuple(slice(at, at + 1) for at in outer)
        for start in range(0, info.shape[cut], step):
            stop = min(start + step, info.shape[cut])
            yield storage.read(name, (*lead, slice(start, stop))).reshape(-1)


def span(storage: WeightStorage, name: str, first: int, count: int) -> Tensor:
    """The bytes from `first` on, `count` of them or as many as there are."""
    found, at = [], 0
    for piece in pieces(storage, name):
        data = piece.view(torch.uint8)
        if at + len(data) > first and at < first + count:
            found.append(data[max(0, first - at) : first + count - at])
        at += len(data)
        if at >= first + count:
            break
    return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8)
