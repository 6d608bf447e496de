"""The CPU module reads a file in pieces, and moves each from a cache to where it belongs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qload.devices.cpu import has_routines
from qload.devices.large_pages import in_large_pages
from qload.native import isa, load, threads
from qload.sentences import Digit

PIECE = 2 << 20  # bytes that each thread reads at once: its caches hold them, and a call costs little beside


def move_from_file(source: tuple[int, int, int], target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
    """target[digits] = source[digits], for elements of `bits` bits that lie in both.

    `source`: of an open file the descriptor, where the elements begin, and their bytes. False where this was
    not done; what `target` holds then is nothing.
    """
    cpu, many = load("cpu").found, threads()
    if cpu is None or not has_routines(target):
        return False
    scratch = in_large_pages(torch.empty(many * PIECE, dtype=torch.uint8))
    at = target.data_ptr(), scratch.data_ptr()
    done: bool = cpu.move_from_file(isa(), bits, list(digits), source, *at, PIECE, many)
    return done
