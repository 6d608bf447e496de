"""The CPU module reads a file in pieces, and moves each from a cache to where it belongs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qload.devices.cpu import has_routines
from qload.devices.large_pages import in_large_pages
from qload.native import isa, load, threads
from qload.sentences import Digit

PIECE = 2 << 20  # bytes of memory of each thread, of which it fills as many at once as stay in its caches

ALIGNED = 64  # bytes at whose multiples the memory of each thread begins


def move_from_file(source: tuple[int, int, int], target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
    """target[digits] = source[digits], for elements of `bits` bits that lie in both.

    `source`: of an open file the descriptor, where the elements begin, and their bytes. False where this was
    not done; what `target` holds then is nothing.
    """
    cpu, many = load("cpu").found, threads()
    if cpu is None or not has_routines(target):
        return False
    piece = min(PIECE, -(-source[2] // ALIGNED) * ALIGNED)
    scratch = in_large_pages(torch.empty(many * piece, dtype=torch.uint8))
    at = target.data_ptr(), scratch.data_ptr()
    done: bool = cpu.move_from_file(isa(), bits, list(digits), source, *at, piece, many)
    return done
