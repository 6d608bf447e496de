"""How blocks are shared out where tokens are many for each expert."""

import pytest
import torch

from qload.kernels.cuda.byte_strips import E2M1
from qload.kernels.cuda.experts import fastest
from qload.kernels.cuda.experts_launches import (
    ALL,
    LAST,
    WHOLE,
    ExpertMatrix,
    ExpertsCall,
    columns_of_block,
    division,
    in_pairs,
    launches,
)


def stacked(experts: int, K: int, N: int, code: int, group: int = 128) -> ExpertMatrix:
    """Sizes alone."""
    words = torch.empty(experts, -(-N // 64), K * (code & 0xFF) * 2, dtype=torch.int32, device="meta")
    return ExpertMatrix(words, words, None, None, None, N, K, code, group)


@pytest.mark.parametrize(
    ("experts", "K", "N", "bits", "shared"),
    [
        (8, 14336, 4096, 4, True),
        (8, 4096, 28672, 4, False),
        (8, 14336, 4096, 8, False),  # blocks of 256 columns
        (66, 256, 512, 4, True),
        (67, 256, 512, 4, False),
        (66, 256, 513, 4, False),
        (1, 128, 512, 4, False),  # one stage
    ],
)
def test_experts_that_leave_half_of_the_places_free_share_k(
    experts: int, K: int, N: int, bits: int, shared: bool
) -> None:
    assert in_pairs(stacked(experts, K, N, bits)) == shared


@pytest.mark.parametrize(
    ("N", "K", "top", "gated", "wanted"),
    [
        (2880, 2944, 4, False, (1, 8)),  # gpt-oss: 90 blocks of two tiles for 132 places
        (4224, 2944, 4, False, (2, 4)),
        (2048, 768, 8, False, (1, 3)),
        (2752, 2944, 4, False, (1, 12)),
        (5760, 2944, 4, True, (2, 4)),
    ],
)
def test_rows_are_shared_by_more_warps_where_blocks_leave_places_free(
    N: int, K: int, top: int, gated: bool, wanted: tuple[int, int]
) -> None:
    assert division(N, K, top, gated) == wanted


@pytest.mark.parametrize(
    ("bits", "tokens", "columns"), [(4, 32, 512), (4, 64, 512), (4, 128, 256), (8, 32, 256)]
)
def test_blocks_have_as_many_columns_as_there_is_room_for(bits: int, tokens: int, columns: int) -> None:
    assert columns_of_block(bits, tokens) == columns


@pytest.mark.parametrize(
    ("bits", "tokens", "columns", "items", "wanted"),
    [
        pytest.param(4, 32, 28672, 8, [(512, WHOLE), (256, LAST)], id="few turns"),
        pytest.param(4, 64, 44 * 512, 24, [(512, WHOLE), (256, LAST)], id="as many as are worth it"),
        pytest.param(4, 64, 44 * 512, 25, [(512, ALL)], id="more"),
        pytest.param(4, 128, 28672, 8, [(256, ALL)], id="blocks that are not halved"),
        pytest.param(8, 32, 28672, 8, [(256, ALL)], id="8 bits"),
        pytest.param(4, 32, 4096, 8, [(512, ALL)], id="pairs that share K"),
    ],
)
def test_a_last_turn_of_halves_is_a_launch_of_its_own(
    bits: int, tokens: int, columns: int, items: int, wanted: list[tuple[int, int]]
) -> None:
    assert launches(stacked(8, 4096, columns, bits), tokens, items) == wanted


@pytest.mark.parametrize(
    ("code", "groups", "tokens", "way"),
    [
        (4, (128, 128), 31, "few"),
        (4, (128, 128), 32, "many"),
        (4, (-1, -1), 31, "few"),
        (4, (64, 128), 7, "few"),
        (4, (64, 128), 8, "many"),
        (4, (128, 32), 8, "many"),
        (E2M1, (16, 16), 31, "few"),
        (E2M1, (32, 32), 32, "many"),
    ],
)
def test_small_groups_of_integers_are_many_from_fewer_pairs_on(
    code: int, groups: tuple[int, int], tokens: int, way: str
) -> None:
    """Of 8 experts, of which a token chooses two."""
    gate_up, down = (stacked(8, 256, 256, code, group) for group in groups)
    ids = torch.empty(tokens, 2, dtype=torch.int32)
    call = ExpertsCall(ids, ids, ids, None, gate_up, down, (0, 0.0, 0.0), False)

    assert fastest(call) == way
