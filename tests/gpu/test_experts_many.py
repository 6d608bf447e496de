"""Experts whose blocks take more than one tile, or share K: sums and bits as of few."""

import pytest
import torch

from qload.kernels.cuda import experts_launches
from qload.kernels.cuda.experts_launches import columns_of_block, in_pairs, launches
from qload.kernels.cuda.hopper_gemm import PLACES
from qload.testing import assert_same_bits
from tests.gpu.expert_calls import BITS, _fits, multiply
from tests.gpu.expert_layers import Tokens, drawn, tokens
from tests.gpu.layers import DTYPES
from tests.gpu.replays import assert_replays
from tests.gpu.test_experts import assert_close, call

__all__ = ["_fits"]  # a fixture

pytestmark = pytest.mark.gpu
E, H, INNER = 24, 256, 1536


@DTYPES
@BITS
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("M", [1, 50, 150, 300, 500])
def test_blocks_take_one_tile_after_another(M: int, zeros: bool, bits: int, dtype: torch.dtype) -> None:
    held = drawn(E, H, INNER, 128, zeros, bits=bits, dtype=dtype)
    chosen = tokens(M, H, 4, E, dtype)

    y = multiply(held, chosen, way="many")

    some = slice(None, None, max(1, M // 40))
    assert_close(held, chosen.rows(some), y[some], rounded=True)
    assert_same_bits(y, multiply(held, chosen, way="many"))
    assert_same_bits(y[M // 2 :], multiply(held, chosen.rows(slice(M // 2, None)), way="many"))


@DTYPES
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("M", [1, 50])
@pytest.mark.parametrize("E", [16, 24, 30, 40, 44, 60])
def test_a_last_turn_in_halves_changes_no_bit(
    E: int, M: int, zeros: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns that no, few, half and nearly all places are left of, and a half that has no columns."""
    held, chosen = drawn(E, H, 1600, 128, zeros, bias=True, dtype=dtype), tokens(M, H, 4, E, dtype)
    y = multiply(held, chosen, way="many")
    monkeypatch.setattr(experts_launches, "MOST_TURNS", 0)

    assert_same_bits(y, multiply(held, chosen, way="many"))
    assert_close(held, chosen, y, rounded=True)


@pytest.mark.parametrize("early", [True, False], ids=["early", "in order"])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero points"])
def test_last_turns_in_a_graph_see_what_was_made_before_them(zeros: bool, early: bool) -> None:
    """Of both matrices a launch of whole turns, one of halves, and then the sum, layer after layer."""
    layers = [drawn(140, 512, inner, zeros=zeros) for inner in (256, 512)]
    chosen = tokens(64, 512, 8, 140, torch.float16)
    assert all(len(launches(each, 32, 140)) == 2 for held in layers for each in (held.gate_up, held.down))

    def chain() -> torch.Tensor:
        y, ids, weights = chosen.x, chosen.ids, chosen.weights
        for i in range(8):
            y = multiply(layers[i % 2], Tokens(y, ids, weights), way="many", early=early)
            y = y / y.float().norm(dim=1, keepdim=True).half()
            ids, weights = (ids + 1) % 140, weights.flip(1)
        return y

    assert_replays(chain)


@BITS
def test_one_matrix_has_more_tiles_than_places_and_the_other_is_shared(bits: int) -> None:
    made = call(drawn(E, H, INNER, bits=bits), tokens(200, H, 4, E, torch.float16))
    columns = columns_of_block(bits, experts_launches.tokens_of_block(made))

    assert E * -(-made.gate_up.columns // columns) > PLACES
    assert (in_pairs(made.gate_up), in_pairs(made.down)) == (False, True)
