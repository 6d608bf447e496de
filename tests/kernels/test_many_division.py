"""How the kernel of many tokens on strips divides a layer: the divisions that were fastest on an H200."""

from itertools import product
from typing import Any

import pytest

from qload.kernels.cuda.many import (
    BLOCK_SHAPES,
    SLICES,
    STAGE,
    ManyDivision,
    division,
    expected,
    in_halves,
)

SEEN = [  # within 3 % of the fastest that was timed: K, N, tokens; a division
    (4096, 4096, 32, (32, 256, True, 3, False)),
    (4096, 4096, 64, (64, 256, True, 3, False)),
    (4096, 4096, 128, (128, 128, True, 2, False)),
    (4096, 4096, 256, (128, 128, True, 1, False)),
    (4096, 4096, 1024, (256, 128, False, 1, True)),
    (8192, 8192, 32, (32, 256, True, 2, False)),
    (8192, 8192, 64, (64, 256, True, 2, False)),
    (8192, 8192, 128, (128, 128, True, 1, False)),
    (8192, 8192, 256, (128, 256, True, 1, False)),
    (8192, 8192, 1024, (256, 128, False, 1, True)),
    (4096, 28672, 32, (32, 512, True, 1, False)),
    (4096, 28672, 64, (64, 512, True, 1, False)),
    (4096, 28672, 128, (128, 256, False, 1, True)),
    (4096, 28672, 256, (256, 128, False, 1, True)),
    (4096, 28672, 1024, (256, 128, False, 1, True)),
    (14336, 4096, 32, (32, 256, True, 4, False)),
    (14336, 4096, 64, (64, 256, True, 4, False)),
    (14336, 4096, 128, (128, 256, True, 4, False)),
    (14336, 4096, 256, (128, 256, True, 2, False)),
    (14336, 4096, 1024, (256, 128, False, 1, True)),
    (28672, 8192, 32, (32, 512, False, 8, False)),
    (28672, 8192, 64, (64, 512, True, 4, False)),
    (28672, 8192, 128, (128, 256, True, 2, False)),
    (28672, 8192, 256, (128, 256, True, 1, False)),
    (28672, 8192, 1024, (256, 128, False, 1, True)),
    (4096, 6144, 32, (32, 256, False, 4, False)),
    (4096, 6144, 64, (64, 128, True, 1, False)),
    (4096, 6144, 128, (128, 128, True, 1, False)),
    (4096, 6144, 256, (128, 256, True, 1, False)),
    (4096, 6144, 1024, (128, 256, True, 1, True)),
    (8192, 57344, 32, (32, 512, False, 1, False)),
    (8192, 57344, 64, (64, 512, False, 1, True)),
    (8192, 57344, 128, (128, 256, False, 1, True)),
    (8192, 57344, 256, (256, 128, True, 1, True)),
    (8192, 57344, 1024, (256, 128, False, 1, True)),
]
SEEN_OF_EIGHT = [
    (4096, 4096, 32, (32, 128, False, 3, True)),
    (4096, 4096, 64, (64, 128, False, 3, True)),
    (4096, 4096, 128, (64, 128, True, 1, False)),
    (4096, 4096, 256, (128, 128, True, 1, False)),
    (4096, 4096, 1024, (256, 128, False, 1, True)),
    (8192, 8192, 32, (32, 128, True, 1, False)),
    (8192, 8192, 64, (64, 128, True, 1, False)),
    (4096, 28672, 32, (32, 256, False, 1, True)),
    (4096, 28672, 64, (64, 256, False, 1, True)),
    (4096, 28672, 128, (128, 256, False, 1, True)),
    (4096, 28672, 256, (256, 128, False, 1, True)),
    (4096, 28672, 1024, (256, 128, False, 1, True)),
]


@pytest.mark.parametrize(
    ("bits", "K", "N", "M", "best"), [*((4, *row) for row in SEEN), *((8, *row) for row in SEEN_OF_EIGHT)]
)
def test_what_is_expected_is_what_was_seen(bits: int, K: int, N: int, M: int, best: tuple[Any, ...]) -> None:
    assert division(M, K, N, bits) == best


@pytest.mark.parametrize("M", [17, 32, 33, 64, 65, 128, 129, 256, 257, 1024, 4096, 100_003])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_block_has_a_stage_and_a_shape_that_a_kernel_has(M: int, bits: int) -> None:
    shapes = [(kind.tokens, kind.columns) for kind in BLOCK_SHAPES if bits in kind.stages]
    for K, N in product((128, 256, 896, 4096, 28672), (64, 128, 512, 8192, 200_000)):
        tokens, columns, pairs, slices, neighbours = division(M, K, N, bits)

        assert (tokens, columns) in shapes, (K, N)
        assert slices in SLICES, (K, N)
        assert slices * (2 if pairs else 1) <= K // STAGE, (K, N)
        assert not (pairs and neighbours) or slices == 1, (K, N)


def test_a_layer_of_one_unit_is_not_divided() -> None:
    assert division(17, 128, 64) == ManyDivision(32, 128, False, 1)


@pytest.mark.parametrize(("K", "N"), [(4096, 4096), (14336, 4096), (8192, 8192), (8192, 57344)])
def test_the_largest_blocks_of_tokens_take_thousands_of_them(K: int, N: int) -> None:
    found = division(4096, K, N)

    assert (found.tokens, found.columns, found.slices, found.neighbours) == (256, 128, 1, True)


@pytest.mark.parametrize(
    ("tokens", "N", "there"),
    [
        (256, 66 * 256, False),  # one whole turn
        (256, 67 * 256, True),  # one tile more, for two blocks
        (256, 99 * 256, True),  # half as many as there is room for
        (256, 100 * 256, False),
        (257, 50 * 256 - 1, False),  # two tiles of tokens: 34 of a second turn
        (512, 49 * 256, True),
        (256, 33 * 256, False),  # less than a turn
    ],
)
def test_a_last_turn_is_of_halves_where_these_fit(tokens: int, N: int, there: bool) -> None:
    kind = next(kind for kind in BLOCK_SHAPES if (kind.tokens, kind.columns) == (256, 128))

    assert in_halves(kind, tokens, N) == there


def test_halves_of_a_last_turn_take_half_its_time() -> None:
    whole, halves = (ManyDivision(256, 128, pairs, 1, neighbours=True) for pairs in (False, True))
    of_a_turn = expected(whole, 4, 256, 8192, 132 * 256) - expected(whole, 4, 256, 8192, 66 * 256)

    saved = expected(whole, 4, 256, 8192, 67 * 256) - expected(halves, 4, 256, 8192, 67 * 256)

    assert 0.4 * of_a_turn < saved < 0.5 * of_a_turn
