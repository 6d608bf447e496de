"""How the kernel of many tokens on strips divides a layer: the divisions that were fastest on an H100."""

from itertools import product
from typing import Any

import pytest

from qload.kernels.cuda.hopper_gemm import (
    BITS,
    BLOCK_SHAPES,
    E2M1,
    E4M3_CODES,
    INT8_CODES,
    SLICES,
    STAGE,
    TABLE,
    TILES,
    ManyDivision,
    division,
    expected,
    in_halves,
)

SEEN = [  # within 3 % of the fastest that was timed: K, N, tokens; a division
    (4096, 4096, 32, (32, 64, True, 1, False, 2)),
    (4096, 4096, 64, (64, 64, True, 1, False, 2)),
    (4096, 4096, 65, (96, 128, True, 1, False, 2)),
    (4096, 4096, 80, (96, 128, True, 1, False, 2)),
    (4096, 4096, 128, (64, 128, True, 1, False, 2)),
    (4096, 4096, 256, (128, 128, True, 1, False, 1)),
    (4096, 4096, 1024, (128, 256, False, 1, True, 1)),
    (4096, 4096, 4096, (128, 256, False, 1, True, 1)),
    (4096, 6144, 32, (32, 128, True, 1, False, 2)),
    (4096, 6144, 64, (64, 128, True, 1, False, 2)),
    (4096, 6144, 65, (96, 128, True, 1, False, 2)),
    (4096, 6144, 80, (96, 128, True, 1, False, 2)),
    (4096, 6144, 96, (96, 128, True, 1, False, 2)),
    (4096, 6144, 128, (128, 128, True, 1, False, 1)),
    (4096, 6144, 160, (160, 128, True, 1, False, 1)),
    (4096, 6144, 256, (128, 192, True, 1, False, 1)),
    (4096, 6144, 384, (192, 128, False, 1, False, 1)),
    (4096, 6144, 1024, (128, 256, True, 1, True, 1)),
    (4096, 6144, 4096, (128, 256, False, 1, True, 1)),
    (4096, 28672, 32, (32, 512, True, 1, False, 1)),
    (4096, 28672, 64, (64, 512, True, 1, False, 1)),
    (4096, 28672, 65, (96, 256, False, 1, False, 1)),
    (4096, 28672, 80, (96, 256, False, 1, False, 1)),
    (4096, 28672, 128, (128, 256, False, 1, True, 1)),
    (4096, 28672, 256, (128, 256, False, 1, True, 1)),
    (4096, 28672, 1024, (128, 256, False, 1, True, 1)),
    (4096, 28672, 4096, (128, 256, True, 1, True, 1)),
    (8192, 8192, 32, (32, 128, True, 1, False, 2)),
    (8192, 8192, 64, (64, 128, True, 1, False, 2)),
    (8192, 8192, 65, (96, 128, True, 1, False, 2)),
    (8192, 8192, 80, (96, 128, True, 1, False, 2)),
    (8192, 8192, 128, (128, 128, True, 1, False, 1)),
    (8192, 8192, 256, (128, 256, True, 1, False, 1)),
    (8192, 8192, 1024, (128, 256, False, 1, True, 1)),
    (8192, 8192, 4096, (128, 256, False, 1, True, 1)),
    (8192, 57344, 32, (32, 512, False, 1, False, 1)),
    (8192, 57344, 64, (64, 512, False, 1, True, 1)),
    (8192, 57344, 128, (128, 256, False, 1, True, 1)),
    (8192, 57344, 256, (128, 256, True, 1, True, 1)),
    (14336, 4096, 64, (64, 128, True, 2, False, 2)),
    (14336, 4096, 128, (128, 128, True, 2, False, 1)),
    (14336, 4096, 256, (128, 128, True, 1, False, 1)),
    (14336, 4096, 1024, (128, 256, False, 1, True, 1)),
    (14336, 4096, 4096, (128, 256, False, 1, True, 1)),
    (28672, 8192, 65, (96, 128, True, 1, False, 2)),
    (28672, 8192, 80, (96, 128, True, 1, False, 2)),
    (28672, 8192, 128, (128, 128, True, 1, False, 1)),
    (28672, 8192, 256, (128, 256, True, 1, False, 1)),
]
SEEN_OF_EIGHT = [
    (4096, 4096, 32, (32, 64, True, 1, False, 2)),
    (4096, 4096, 64, (64, 64, True, 1, False, 2)),
    (4096, 4096, 128, (64, 128, True, 1, False, 1)),
    (4096, 4096, 256, (128, 128, True, 1, False, 1)),
    (4096, 4096, 1024, (256, 128, False, 1, True, 1)),
    (4096, 4096, 4096, (256, 128, False, 1, True, 1)),
    (4096, 28672, 32, (32, 256, False, 1, True, 1)),
    (4096, 28672, 64, (96, 256, False, 1, True, 1)),
    (4096, 28672, 80, (96, 256, False, 1, True, 1)),
    (4096, 28672, 128, (128, 256, False, 1, True, 1)),
    (4096, 28672, 1024, (256, 128, False, 1, True, 1)),
    (4096, 28672, 4096, (256, 128, True, 1, True, 1)),
    (8192, 8192, 32, (32, 128, True, 1, False, 2)),
    (8192, 8192, 64, (64, 128, True, 1, False, 2)),
    (8192, 8192, 80, (128, 128, True, 1, False, 1)),
    (8192, 8192, 128, (128, 128, True, 1, False, 1)),
    (8192, 8192, 256, (128, 128, False, 1, True, 1)),
    (8192, 8192, 1024, (256, 128, False, 1, True, 1)),
    (8192, 8192, 4096, (256, 128, False, 1, True, 1)),
]
SEEN_OF_CODES = [  # on both sides
    (4096, 14336, 64, (64, 128, False, 1, True, 1)),
    (4096, 14336, 128, (128, 128, False, 1, True, 1)),
    (4096, 14336, 256, (256, 128, False, 1, True, 1)),
    (4096, 14336, 1024, (256, 128, True, 1, True, 1)),
    (8192, 8192, 64, (64, 128, True, 1, False, 1)),
    (8192, 8192, 128, (128, 128, True, 1, False, 1)),
    (8192, 8192, 256, (256, 128, True, 1, False, 1)),
    (8192, 8192, 512, (256, 128, False, 1, True, 1)),
    (8192, 8192, 4096, (256, 128, False, 1, True, 1)),
    (4096, 4096, 256, (128, 128, True, 1, False, 1)),
    (4096, 4096, 512, (256, 128, True, 1, False, 1)),
]


SEEN_OF_OTHERS = [
    (E2M1, 8192, 8192, 32, (32, 128, True, 1, False, 2)),
    (E2M1, 4096, 28672, 2048, (192, 128, False, 1, False, 1)),
    (TABLE, 8192, 8192, 32, (32, 128, True, 1, False, 2)),
    (TABLE, 8192, 8192, 2048, (224, 128, False, 1, False, 1)),
    (TABLE, 4096, 28672, 2048, (224, 128, False, 1, False, 1)),
    (TILES, 4096, 4096, 512, (128, 256, True, 1, False, 1)),
    (TILES, 8192, 8192, 256, (128, 256, True, 1, False, 1)),
    (TILES, 4096, 28672, 256, (256, 128, False, 1, True, 1)),
]


@pytest.mark.parametrize(
    ("codes", "K", "N", "M", "best"),
    [
        *((4, *row) for row in SEEN),
        *((8, *row) for row in SEEN_OF_EIGHT),
        *SEEN_OF_OTHERS,
        *((codes, *row) for codes in (INT8_CODES, E4M3_CODES) for row in SEEN_OF_CODES),
    ],
)
def test_what_is_expected_is_what_was_seen(
    codes: int | str, K: int, N: int, M: int, best: tuple[Any, ...]
) -> None:
    assert division(M, K, N, codes) == best


@pytest.mark.parametrize("M", [17, 32, 33, 64, 65, 128, 129, 256, 257, 1024, 4096, 100_003])
@pytest.mark.parametrize("codes", BITS)
def test_every_block_has_a_stage_and_a_shape_that_a_kernel_has(M: int, codes: int | str) -> None:
    shapes = [(kind.tokens, kind.columns, kind.teams) for kind in BLOCK_SHAPES if codes in kind.stages]
    for K, N in product((128, 256, 896, 4096, 28672), (64, 128, 512, 8192, 200_000)):
        found = division(M, K, N, codes)
        tokens, columns, pairs, slices, neighbours, teams = found

        assert (tokens, columns, teams) in shapes, (K, N)
        assert slices in SLICES, (K, N)
        assert slices * (2 if pairs else 1) * teams == found.parts <= K // STAGE, (K, N)
        assert not (pairs and neighbours) or slices == 1, (K, N)
        assert not (teams > 1 and neighbours), (K, N)


def test_a_layer_of_one_unit_is_not_divided() -> None:
    assert division(17, 128, 64) == ManyDivision(32, 128, False, 1)


@pytest.mark.parametrize(("K", "N"), [(4096, 4096), (14336, 4096), (8192, 8192), (8192, 57344)])
def test_blocks_of_the_most_sums_take_thousands_of_tokens_and_share_them(K: int, N: int) -> None:
    found = division(4096, K, N)

    assert (found.tokens * found.columns, found.slices, found.neighbours) == (256 * 128, 1, True)


@pytest.mark.parametrize(
    ("tokens", "N", "there"),
    [
        (128, 66 * 512, False),  # one whole turn
        (128, 67 * 512, True),  # one tile more, for two blocks
        (128, 99 * 512, True),  # half as many as there is room for
        (128, 100 * 512, False),
        (129, 50 * 512 - 1, False),  # two tiles of tokens: 34 of a second turn
        (256, 49 * 512, True),
        (128, 33 * 512, False),  # less than a turn
    ],
)
def test_a_last_turn_is_of_halves_where_these_fit(tokens: int, N: int, there: bool) -> None:
    kind = next(kind for kind in BLOCK_SHAPES if (kind.tokens, kind.columns) == (128, 256))

    assert in_halves(kind, tokens, N) == there


def test_halves_of_a_last_turn_take_half_its_time() -> None:
    whole, halves = (ManyDivision(128, 256, pairs, 1, neighbours=True) for pairs in (False, True))
    of_a_turn = expected(whole, 4, 128, 8192, 132 * 512) - expected(whole, 4, 128, 8192, 66 * 512)

    saved = expected(whole, 4, 128, 8192, 67 * 512) - expected(halves, 4, 128, 8192, 67 * 512)

    assert 0.4 * of_a_turn < saved < 0.5 * of_a_turn
