"""How the kernel of many tokens before Hopper divides a layer: the divisions that were fastest on an H100."""

import pytest

from qload.kernels.cuda.mma_gemm import SHARED, WARPS, division, stage_bytes

PLACES = 132  # multiprocessors of that chip
SEEN = [  # within 7 % of the fastest that was timed for 8192 x 8192
    (16, (32, 4, 2, 4)),
    (32, (32, 4, 2, 4)),
    (64, (64, 4, 2, 4)),
    (128, (64, 4, 2, 2)),
    (256, (64, 4, 2, 1)),
    (2048, (64, 4, 1, 1)),
]


@pytest.mark.parametrize(("M", "best"), SEEN)
def test_the_expected_division_is_a_fast_one(M: int, best: tuple[int, int, int, int]) -> None:
    assert division(M, 8192, 8192, PLACES) == best


@pytest.mark.parametrize("M", [1, 17, 32, 33, 49, 64, 65, 96, 97, 256, 5000])
@pytest.mark.parametrize("K", [128, 256, 1152, 4096])
@pytest.mark.parametrize("N", [64, 512, 8192, 200000])
@pytest.mark.parametrize("places", [16, 108, PLACES])
def test_every_warp_has_rows_and_two_stages_have_room(M: int, K: int, N: int, places: int) -> None:
    way = division(M, K, N, places)

    assert way.row_warps * way.slices <= K // 128
    assert way.block_tokens * way.tiles * way.row_warps == way.tokens * WARPS
    assert 2 * stage_bytes(way) <= SHARED
