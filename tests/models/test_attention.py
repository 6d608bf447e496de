"""Attention over pages against its formula in float64; windows, chunks, sinks, grouped heads; the cache."""

import math

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError, ShapeError
from qload.models import PagedCache, Step, attend
from qload.models.attention import query_scales

pytestmark = pytest.mark.usefixtures("seen_texts")

S, Q, L, HEADS, KV, DK, DV = 2, 3, 12, 6, 2, 8, 4
SCALE = DK**-0.5
LIMITS = [(None, None), (4, None), (None, 5), (3, 5)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    window: int | None,
    chunk: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """One query after another, in float64."""
    y = torch.zeros(S, Q, HEADS, DV, dtype=torch.float64)
    for s, t, h in ((s, t, h) for s in range(S) for t in range(Q) for h in range(HEADS)):
        at, kv = int(positions[s, t]), h // (HEADS // KV)
        seen = [j for j in range(at + 1) if not window or at - j < window]
        seen = [j for j in seen if not chunk or at // chunk == j // chunk]
        scores = torch.stack([q[s, t, h].double() @ k[s, j, kv].double() * SCALE for j in seen]).exp()
        total = scores.sum() + (0 if sinks is None else sinks[h].double().exp())
        y[s, t, h] = (scores[:, None] * v[s, seen, kv].double()).sum(0) / total
    return y


@pytest.mark.parametrize(("window", "chunk"), LIMITS)
@pytest.mark.parametrize("sunk", [False, True])
def test_attention_is_its_formula(window: int | None, chunk: int | None, sunk: bool) -> None:
    q, k, v = drawn(S, Q, HEADS, DK), drawn(S, L, KV, DK, seed=1), drawn(S, L, KV, DV, seed=2)
    positions = torch.tensor([[9, 10, 11], [0, 1, 2]])
    sinks = drawn(HEADS, seed=3) if sunk else None

    got = attend(q, k, v, positions, scale=SCALE, window=window, chunk=chunk, sinks=sinks)

    bound = 2.0**-23 * (DK + L + 8) * 8 * v.abs().max()  # a few roundings of each score, weight and summand
    assert (got - formula(q, k, v, positions, window, chunk, sinks)).abs().max() <= bound


def test_what_is_not_seen_takes_no_part_whatever_it_is() -> None:
    q, k, v = drawn(S, Q, HEADS, DK), drawn(S, L, KV, DK, seed=1), drawn(S, L, KV, DV, seed=2)
    positions = torch.tensor([3, 4, 5, 3, 4, 5])
    before = attend(q, k, v, positions, scale=SCALE)
    k[:, 6:], v[:, 6:] = 1e4, -1e4

    assert torch.equal(attend(q, k, v, positions, scale=SCALE), before)


def test_heads_that_fit_no_heads_of_keys_are_refused() -> None:
    q, k, v = drawn(1, 1, 5, DK), drawn(1, 2, 2, DK), drawn(1, 2, 2, DV)
    with pytest.raises(ShapeError, match="a divisor of 5"):
        attend(q, k, v, torch.zeros(1, 1, dtype=torch.int64), scale=1.0)
    with pytest.raises(ShapeError, match="attention: v"):
        attend(q[:, :, :4], k, v[:, :1], torch.zeros(1, 1, dtype=torch.int64), scale=1.0)


def test_a_cache_gives_back_in_the_order_of_pages_what_was_written_to_slots() -> None:
    cache = PagedCache(2, 3, 2, KV, DK, DV, torch.float32)
    k, v = drawn(4, KV, DK), drawn(4, KV, DV)
    step = Step.of([0], tokens=4, pages=[[2, 0]], page_size=2)

    cache.write(1, step.slots, k, v)

    keys, values = cache.read(1, step.pages)
    assert torch.equal(keys, k[None])
    assert torch.equal(values, v[None])
    assert not any(held.any() for held in cache.read(0, step.pages))
    assert cache.bytes == 2 * 3 * 2 * KV * (DK + DV) * 4


@pytest.mark.parametrize("name", ["layers", "pages", "page_size", "kv_heads", "k_dim", "v_dim"])
def test_a_cache_of_nothing_is_refused_by_the_name_of_the_size(name: str) -> None:
    sizes = dict.fromkeys(("layers", "pages", "page_size", "kv_heads", "k_dim", "v_dim"), 1) | {name: 0}
    with pytest.raises(ArgumentError, match=name):
        PagedCache(**sizes, dtype=torch.float32)


def test_steps_of_several_sequences_and_pages_have_their_slots() -> None:
    step = Step.of([3, 0], tokens=2, pages=[[4, 1], [0, 0]], page_size=4)

    assert step.positions.tolist() == [3, 4, 0, 1]
    assert step.slots.tolist() == [4 * 4 + 3, 1 * 4 + 0, 0, 1]
    assert (step.sequences, step.new) == (2, 2)


def test_what_a_step_keeps_is_made_once_and_not_kept_beyond_its_pass() -> None:
    step, made = Step.of([0], tokens=1, pages=[[0]], page_size=1), []

    assert step.kept("key", lambda: made.append(1) or "first") == "first"
    assert step.kept("key", lambda: made.append(2) or "second") == "first"
    assert step.begun().kept("key", lambda: "third") == "third"
    assert made == [1]


@pytest.mark.parametrize(
    ("positions", "slots", "pages", "error"),
    [
        ([0, 1, 2], [0, 1, 2], [[0], [1]], ShapeError),
        ([0, 1], [0], [[0]], ShapeError),
        ([[0]], [0], [[0]], ShapeError),
        ([0], [0], [0], ShapeError),
        ([0.0], [0], [[0]], ArgumentError),
        ([True], [0], [[0]], ArgumentError),
    ],
)
def test_steps_that_do_not_fit_are_refused(positions: list, slots: list, pages: list, error: type) -> None:
    with pytest.raises(error, match="step: "):
        Step(*map(torch.tensor, (positions, slots, pages)))


def test_llama_4s_temperature_grows_with_each_floor_that_is_full() -> None:
    got = query_scales(torch.tensor([0, 3, 4, 7, 8, 99]), 4.0, 0.1).flatten()

    want = [1 + 0.1 * math.log1p((at + 1) // 4) for at in (0, 3, 4, 7, 8, 99)]
    torch.testing.assert_close(got, torch.tensor(want), rtol=2.0**-22, atol=0)
