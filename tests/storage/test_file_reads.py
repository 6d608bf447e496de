"""Rectangular slices of tensors in files: the right bytes, in few reads for given gap and scratch limits."""

import math
from itertools import combinations, product

import numpy as np
import pytest

from qload.storage.file_reads import GAP, SCRATCH_BYTES, Bounds, read_slices, run_places
from qload.storage.header import ITEM_BYTES, Entry

BEGIN = 3  # offset of the tensor in its file


class Bytes:
    """File in memory with a record of reads: (position, bytes)."""

    def __init__(self, count: int) -> None:
        self.content = np.random.default_rng(1).integers(0, 256, BEGIN + count, np.uint8)
        self.reads: list[tuple[int, int]] = []

    def read_into(self, buffer: memoryview, at: int) -> None:
        assert 0 <= at <= at + len(buffer) <= len(self.content)
        buffer[:] = self.content[at : at + len(buffer)].data
        self.reads.append((at, len(buffer)))


def read(shape: tuple[int, ...], pairs: Bounds, dtype: str = "U8") -> list[tuple[int, int]]:
    """Read a slice, compare it with numpy, and return the reads."""
    size = ITEM_BYTES[dtype]
    file = Bytes(math.prod(shape) * size)
    entry = Entry(dtype, shape, BEGIN, BEGIN + math.prod(shape) * size)
    whole = file.content[BEGIN:].reshape(*shape, size)

    made = read_slices(file, entry, pairs)

    assert made.tobytes() == whole[tuple(slice(*pair) for pair in pairs)].tobytes()
    return file.reads


@pytest.mark.parametrize("dtype", ["U8", "F16", "F64"])
@pytest.mark.parametrize(
    ("shape", "pairs", "reads"),
    [
        pytest.param((), (), 1, id="a scalar"),
        pytest.param((5,), ((1, 4),), 1, id="a run"),
        pytest.param((5, 7), ((1, 4), (0, 7)), 1, id="whole rows"),
        pytest.param((5, 7), ((0, 5), (2, 4)), 1, id="columns"),
        pytest.param((3, 4, 5), ((0, 3), (1, 3), (0, 5)), 1, id="rows of every block"),
        pytest.param((3, 4, 5), ((1, 3), (1, 3), (2, 5)), 2, id="a box"),
        pytest.param((3, 2, 4, 5), ((1, 3), (0, 2), (1, 3), (2, 5)), 4, id="a box of four dimensions"),
        pytest.param((2, 3, 4, 5), ((0, 2), (1, 2), (0, 4), (3, 4)), 2, id="a column of every second block"),
    ],
)
def test_any_rectangle_in_one_read_a_block(
    dtype: str, shape: tuple[int, ...], pairs: Bounds, reads: int
) -> None:
    assert len(read(shape, pairs, dtype)) == reads


@pytest.mark.parametrize(("gap", "reads"), [(GAP, [2 * (GAP + 8) + 8]), (GAP + 1, [8, 8, 8])])
def test_what_lies_between_runs_is_read_too_up_to_the_limit(gap: int, reads: list[int]) -> None:
    assert [count for _, count in read((3, gap + 8), ((0, 3), (5, 13)))] == reads


def test_no_more_is_read_at_once_than_the_limit_on_scratch() -> None:
    stride = GAP
    step = SCRATCH_BYTES // stride
    found = read((2 * step + 1, stride), ((0, 2 * step + 1), (1, stride)))

    assert [count for _, count in found] == [SCRATCH_BYTES - 1, SCRATCH_BYTES - 1, stride - 1]
    assert [at for at, _ in found] == [BEGIN + 1 + part * SCRATCH_BYTES for part in range(3)]


def test_rows_longer_than_the_limit_on_scratch_are_read_one_by_one() -> None:
    stride = SCRATCH_BYTES + 1

    assert [count for _, count in read((2, stride), ((0, 2), (0, stride - 1)))] == [
        SCRATCH_BYTES,
        SCRATCH_BYTES,
    ]


@pytest.mark.parametrize("shape", [(5,), (4, 3), (3, 2, 4), (2, 3, 2, 3), (1, 1, 4)])
def test_runs_at_equal_distances_are_the_bytes_of_a_slice(shape: tuple[int, ...]) -> None:
    """All slices of small tensors, by the places of their elements."""
    size = ITEM_BYTES["F16"]
    entry = Entry("F16", shape, BEGIN, BEGIN + math.prod(shape) * size)
    places = BEGIN + size * np.arange(math.prod(shape)).reshape(shape)
    for pairs in product(*(combinations(range(length + 1), 2) for length in shape)):
        elements = places[tuple(slice(*pair) for pair in pairs)].reshape(-1)
        starts = elements[np.diff(elements, prepend=-size) != size]
        found = run_places(entry, pairs)

        if found is None:
            assert len({*np.diff(starts)}) > 1
            continue
        first, number, distance = found
        runs = first + distance * np.arange(number)[:, None] + size * np.arange(len(elements) // number)
        assert runs.reshape(-1).tolist() == elements.tolist()
        assert number == len(starts)
        assert bool(distance) is (number > 1)
