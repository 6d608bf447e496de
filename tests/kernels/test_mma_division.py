"""How the kernel of many tokens before Hopper divides a layer: the divisions that were fastest on an H100."""

from types import SimpleNamespace

import pytest
import torch

from qload.kernels.chips import LEAST_SHARED, shared_memory
from qload.kernels.cuda.mma_gemm import WARPS, division, fits

PLACES, SHARED = 132, 227 << 10  # multiprocessors of that chip, shared memory of a block
SEEN = [  # within 5 % of the fastest that was timed for a layer of K inputs and N outputs
    (16, 8192, 8192, (32, 4, 2, 4)),
    (64, 8192, 8192, (64, 2, 4, 2)),
    (64, 4096, 14336, (64, 2, 4, 1)),
    (96, 8192, 8192, (48, 2, 4, 1)),
    (128, 8192, 8192, (64, 2, 4, 1)),
    (128, 4096, 14336, (64, 4, 2, 1)),
    (256, 8192, 8192, (64, 4, 2, 1)),
    (256, 4096, 14336, (64, 4, 1, 1)),
    (2048, 8192, 8192, (64, 4, 1, 1)),
]


@pytest.mark.parametrize(("M", "K", "N", "best"), SEEN)
def test_the_expected_division_is_a_fast_one(M: int, K: int, N: int, best: tuple[int, int, int, int]) -> None:
    assert division(M, K, N, PLACES, SHARED) == best


@pytest.mark.parametrize(("M", "best"), [(64, (64, 4, 2, 4)), (128, (64, 4, 2, 2))])
def test_a_chip_with_less_shared_memory_gets_smaller_stages(M: int, best: tuple[int, int, int, int]) -> None:
    assert division(M, 8192, 8192, PLACES, LEAST_SHARED) == best


@pytest.mark.parametrize(
    ("properties", "shared"), [({"shared_memory_per_block_optin": SHARED}, SHARED), ({}, LEAST_SHARED)]
)
def test_shared_memory_is_the_chips_or_the_least(
    properties: dict[str, int], shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))

    assert shared_memory(torch.device("cuda")) == shared
    assert shared_memory(torch.device("cpu")) == LEAST_SHARED


@pytest.mark.parametrize("M", [1, 17, 32, 33, 49, 64, 65, 96, 97, 256, 5000])
@pytest.mark.parametrize("K", [128, 256, 1152, 4096])
@pytest.mark.parametrize("N", [64, 512, 8192, 200000])
@pytest.mark.parametrize(("places", "shared"), [(16, LEAST_SHARED), (108, 163 << 10), (PLACES, SHARED)])
def test_every_warp_has_rows_and_two_stages_have_room(
    M: int, K: int, N: int, places: int, shared: int
) -> None:
    way = division(M, K, N, places, shared)

    assert way.row_warps * way.slices <= K // 128
    assert way.block_tokens * way.tiles * way.row_warps == way.tokens * WARPS
    assert fits(way, shared)
