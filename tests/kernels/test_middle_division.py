"""How the kernel of 17 tokens and more divides a layer: the divisions that were fastest on an H200."""

import pytest

from qload.kernels.cuda.middle import BLOCK_SHAPES, CLUSTERS, division

SEEN = [  # K, N, and for 32, 64 and 128 tokens columns, blocks of a multiprocessor, blocks that share K
    (4096, 4096, [(256, 1, 6), (256, 1, 6), (256, 1, 6)]),
    (4096, 6144, [(256, 1, 4), (256, 1, 4), (256, 1, 4)]),
    (4096, 28672, [(256, 2, 2), (256, 1, 1), (256, 1, 1)]),
    (14336, 4096, [(256, 1, 6), (256, 1, 6), (256, 1, 6)]),
    (8192, 8192, [(256, 2, 7), (512, 1, 6), (256, 1, 3)]),
    (8192, 57344, [(256, 2, 1), (512, 1, 1), (256, 1, 1)]),
    (28672, 8192, [(256, 2, 7), (512, 1, 6), (256, 1, 3)]),
]


@pytest.mark.parametrize(("K", "N", "best"), SEEN)
def test_what_is_expected_is_what_was_seen(K: int, N: int, best: list[tuple[int, int, int]]) -> None:
    assert [division(M, K, N) for M in (32, 64, 128)] == best


@pytest.mark.parametrize("M", [17, 32, 33, 64, 65, 128, 129, 256])
@pytest.mark.parametrize("K", [64, 128, 448, 512, 4096])
@pytest.mark.parametrize("N", [64, 512, 8192, 200000])
def test_every_block_has_a_stage_and_columns_that_a_kernel_has(M: int, K: int, N: int) -> None:
    columns, together, split = division(M, K, N)

    assert 1 <= split <= min(8, K // 64)
    tokens = min(kind.tokens for kind in BLOCK_SHAPES if kind.tokens >= min(M, 128))
    assert (tokens, columns, together) in [
        (kind.tokens, kind.columns, kind.together) for kind in BLOCK_SHAPES
    ]


def test_fewer_and_larger_clusters_never_hold_more_blocks_than_single_ones() -> None:
    for held in CLUSTERS.values():
        assert all(count * (i + 1) <= held[0] for i, count in enumerate(held))
