"""Calls of experts: pairs sorted on the device, memory, graphs and streams, the operator, what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels.cuda import experts
from qload.kernels.cuda.experts_launches import ExpertsCall, sorted_pairs
from qload.testing import assert_same_bits
from tests.gpu.expert_calls import BITS, WAYS, _fits, multiply
from tests.gpu.expert_layers import Tokens, drawn, tokens
from tests.gpu.replays import assert_replays

__all__ = ["_fits"]  # a fixture

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("M", "E", "top"), [(1, 1, 1), (3, 8, 2), (64, 128, 8), (311, 61, 7), (1024, 256, 8)]
)
@pytest.mark.parametrize("size", [4, 8, 64, 1000])
def test_pairs_are_sorted_by_expert_and_cut_into_items(M: int, E: int, top: int, size: int) -> None:
    held, chosen = drawn(1, 128, 64), tokens(M, 128, top, E, torch.float16)
    place = torch.arange(E, device="cuda", dtype=torch.int32)
    place[E // 2] = -1
    made = ExpertsCall(
        chosen.x, chosen.ids, chosen.weights, place, held.gate_up, _wide(held.down, E), (0, 0.0, 0.0), False
    )

    got = sorted_pairs(made, size, placed=True)

    at = place[chosen.ids].flatten()
    local = (at >= 0).nonzero().flatten()
    order = local[at[local].argsort(stable=True)]
    assert got.order is not None
    assert got.items is not None
    assert got.places is not None
    assert got.order.tolist() == order.tolist() + [-1] * (M * top - len(order))
    assert [got.places.tolist()[pair] for pair in order.tolist()] == list(range(len(order)))
    assert bool((got.places[at < 0] == -1).all())
    want, first = [], 0
    for expert, count in enumerate(at[local].bincount(minlength=E).tolist()):
        want += [[expert, first + i, min(size, count - i)] for i in range(0, count, size)]
        first += count
    items = got.items.tolist()
    assert [item[:3] for item in items[: len(want)]] == want
    assert [item[4 : 4 + item[2]] for item in items[: len(want)]] == [
        order[start : start + count].tolist() for _, start, count in want
    ]
    assert {item[2] for item in items[len(want) :]} == {-1}


def _wide(matrix: Any, E: int) -> Any:
    """The shape of more experts; nobody reads them."""
    weights = matrix.weights.expand(E, -1, -1)
    return type(matrix)(weights, matrix.scales, None, None, None, matrix.N, matrix.K, 4, matrix.group_size)


@pytest.mark.parametrize("M", [1, 9, 64])
@WAYS
def test_nothing_but_the_result_is_written(M: int, way: str) -> None:
    held, chosen = drawn(4, 200, 104, 32, True, bias=True), tokens(M, 200, 2, 4, torch.float16)
    read = [t for each in (held.gate_up, held.down) for t in experts.tensors(each) if t is not None]
    read += [chosen.x, chosen.ids, chosen.weights]
    before = [each.clone() for each in read]
    for dtype in (torch.float16, torch.float32):  # what a kernel leaves out is NaN
        pool = torch.full((64, 2 * M, 208), torch.nan, device="cuda", dtype=dtype)
        del pool

    y = multiply(held, chosen, way=way)

    assert not bool(y.isnan().any())
    for each, was in zip(read, before, strict=True):
        assert_same_bits(each, was)


@BITS
@pytest.mark.parametrize("M", [1, 8, 64])
@WAYS
def test_a_hundred_runs_have_the_same_bits(M: int, bits: int, way: str) -> None:
    held, chosen = drawn(16, 1024, 384, bits=bits), tokens(M, 1024, 4, 16, torch.float16)
    want = multiply(held, chosen, way=way)

    for _ in range(100):
        assert_same_bits(multiply(held, chosen, way=way), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32 weights", "float16 weights"])
@pytest.mark.parametrize("M", [1, 8, 40])
@WAYS
def test_layers_one_after_another_in_a_graph_see_each_other(M: int, way: str, dtype: torch.dtype) -> None:
    """What a kernel reads the kernel before has written, though it may start before that ends."""
    layers = [drawn(8, 512, inner, bits=bits) for inner, bits in ((256, 4), (192, 4), (256, 8))]
    chosen = tokens(M, 512, 2, 8, torch.float16)

    def chain() -> Tensor:
        y, ids, weights = chosen.x, chosen.ids, chosen.weights.to(dtype)
        for i in range(12):
            y = multiply(layers[i % 3], Tokens(y, ids, weights), way=way)
            y = y / y.float().norm(dim=1, keepdim=True).half()
            ids = ids.flip(1) if i % 2 else (ids + 1) % 8
            weights = weights.flip(1) * (1.25 if i % 2 else 0.75)
        return y

    assert_replays(chain)


@WAYS
def test_two_streams_do_not_meet(way: str) -> None:
    held = drawn(16, 1024, 384)
    chosen = [tokens(M, 1024, 4, 16, torch.float16) for M in (1, 64)]
    want = [multiply(held, each, way=way) for each in chosen]
    streams, got = [torch.cuda.Stream(), torch.cuda.Stream()], []
    torch.cuda.synchronize()
    for _ in range(50):
        for i in (0, 1):
            with torch.cuda.stream(streams[i]):
                got.append((i, multiply(held, chosen[i], way=way)))
    torch.cuda.synchronize()

    for i, y in got:
        assert_same_bits(y, want[i])


def test_the_operator_is_one_that_torch_can_trace() -> None:
    held, chosen = drawn(4, 256, 128, zeros=True, bias=True), tokens(3, 256, 2, 4, torch.float16)
    read = chosen.x, chosen.ids, chosen.weights, None
    matrices = *experts.tensors(held.gate_up), *experts.tensors(held.down)
    kind = *experts.sizes(held.gate_up, held.down), "silu", 0.0, 0.0, False

    torch.library.opcheck(torch.ops.qload.experts.default, (*read, *matrices, *kind))


@pytest.mark.parametrize("M", [0, 1])
def test_nothing_chosen_is_nothing(M: int) -> None:
    held = drawn(4, 256, 128)
    x = torch.ones(M, 256, device="cuda", dtype=torch.float16)
    ids = torch.empty(M, 0, device="cuda", dtype=torch.int64)

    y = multiply(held, Tokens(x, ids, ids.float()))

    assert_same_bits(y, torch.zeros_like(x))


def test_what_does_not_fit_is_named() -> None:
    held, chosen = drawn(4, 256, 128), tokens(3, 256, 2, 4, torch.float16)
    cases = {
        "topk_ids": Tokens(chosen.x, chosen.ids[:2], chosen.weights[:2]),
        "topk_weights": Tokens(chosen.x, chosen.ids, chosen.weights[:, :1]),
        "gate_up.scales": Tokens(chosen.x.bfloat16(), chosen.ids, chosen.weights),
        "gate_up.weights": Tokens(torch.ones(3, 257, device="cuda").half(), chosen.ids, chosen.weights),
    }
    for name, wrong in cases.items():
        with pytest.raises(ArgumentError, match=name):
            multiply(held, wrong)
    for option in ({"activation": "relu"}, {"way": "other"}):
        read = chosen.x, chosen.ids, chosen.weights, held.gate_up, held.down
        with pytest.raises(ArgumentError, match=next(iter(option))):
            experts.multiply(*read, **option)
