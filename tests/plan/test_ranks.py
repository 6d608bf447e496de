"""Numbers of ranks that are none, or too many to ask each, and layers that every rank has whole."""

from typing import Any

import pytest
import torch

from qload import MemoryStorage, Weights, loader_from_config, plan
from qload.errors import ArgumentError
from qload.plan import sharing
from qload.plan.sharing import MAX_RANKS
from tests.plan.test_plan import gptq

pytestmark = pytest.mark.usefixtures("seen_texts")


@pytest.mark.parametrize(
    "asked",
    [
        {"tp": 0},
        {"tp": ()},
        {"tp": (1, -2)},
        {"ep": 0},
        {"ep": 2},
        {"tp": "2"},
        {"tp": MAX_RANKS + 1},
        {"tp": (1, 1_000_000)},
    ],
    ids=str,
)
def test_what_means_no_ranks_or_too_many_is_an_argument_error(asked: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        plan(gptq(64, 64), **asked)


def test_of_a_layer_that_is_not_cut_one_rank_is_asked_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, own = list[int](), sharing.share_bytes
    monkeypatch.setattr(sharing, "share_bytes", lambda shares: asked.append(len(shares)) or own(shares))
    held = Weights(MemoryStorage({"norm.weight": torch.ones(48)}), loader=loader_from_config(None))

    found = plan(held, tp=(1, MAX_RANKS))

    assert found.worlds[MAX_RANKS].bytes == (4 * 48,) * MAX_RANKS
    assert asked == [1, 1]
