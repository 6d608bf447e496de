"""Tokens sorted by expert, by hand."""

import pytest
import torch

from qload.errors import ArgumentError
from qload.kernels.experts_function import RoutedTokens, routed

pytestmark = pytest.mark.usefixtures("seen_texts")

IDS = torch.tensor([[4, 2], [2, 0], [3, 5]])


def pairs(found: RoutedTokens) -> list[tuple[int, list[tuple[int, int]]]]:
    """Of each expert its place, and the pairs of a token and a slot."""
    each = iter(zip(found.tokens.tolist(), found.slots.tolist(), strict=True))
    return [(p, [next(each) for _ in range(n)]) for p, n in zip(found.places, found.counts, strict=True)]


def test_pairs_of_tokens_and_slots_by_the_place_of_the_expert() -> None:
    all_here = [(0, [(1, 1)]), (2, [(0, 1), (1, 0)]), (3, [(2, 0)]), (4, [(0, 0)]), (5, [(2, 1)])]

    for ids in (IDS, IDS.int(), IDS.T.contiguous().T):
        assert pairs(routed(ids, [0, 1, 2, 3, 4, 5])) == all_here
    assert pairs(routed(IDS, [-1, -1, 0, 1, -1, -1])) == [(0, [(0, 1), (1, 0)]), (1, [(2, 0)])]
    assert routed(IDS, [5, 4, 3, 2, 1, 0]).places == [5, 3, 2, 1, 0]


def test_nothing_is_routed_of_no_token_no_slot_and_experts_elsewhere() -> None:
    for ids in (IDS[:0], IDS[:, :0], IDS):
        found = routed(ids, [-1] * 6)
        assert pairs(found) == []
        assert list(found.runs(3)) == []
        assert found.turns() == []


def test_a_number_of_no_expert_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"numbers of experts, 0 to 4\n  got      5 at \(2, 1\)$"):
        routed(IDS, [0, 1, 2, 3, 4])
    with pytest.raises(ArgumentError, match=r"got      -1 at \(0, 0\) \(2 in all\)$"):
        routed(torch.tensor([[-1, 2], [3, 4]]), [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("most", "places"),
    [(1, [[0], [1], [2], [3]]), (3, [[0], [1, 2], [3]]), (4, [[0], [1, 2], [3]]), (9, [[0, 1, 2, 3]])],
)
def test_runs_are_whole_experts(most: int, places: list[list[int]]) -> None:
    """Of 4, 1, 2 and 2 pairs."""
    found = routed(torch.tensor([[0, 1, 0], [2, 0, 3], [0, 3, 2]]), [0, 1, 2, 3])
    runs = list(found.runs(most))

    assert [run.places for run in runs] == places
    assert [pair for run in runs for pair in pairs(run)] == pairs(found)


def test_in_a_turn_no_token_is_twice_and_turns_keep_its_order() -> None:
    found = routed(torch.tensor([[3, 1, 1], [0, 3, 2]]), [0, 1, 2, 3])

    turns = [turn.tolist() for turn in found.turns()]

    assert found.tokens.tolist() == [1, 0, 0, 1, 0, 1]
    assert turns == [[0, 1], [2, 3], [4, 5]]
