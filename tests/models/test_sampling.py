"""A token is chosen as the settings say, by numbers that come from the seed alone."""

from itertools import islice
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload import ArgumentError
from qload.models.generation import GREEDY, NOT_FINITE, Sampler

LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0]]).log_softmax(-1)
P = LOGITS[0].exp().double()


def chosen(sampler: Sampler, u: float, logits: torch.Tensor = LOGITS) -> int:
    return int(sampler.choose(logits, torch.tensor([u], dtype=torch.float64)))


def test_numbers_of_a_sequence_are_those_of_python_for_the_seed_and_the_sequence() -> None:
    """Programs that generate the same text again depend on them."""
    python = Random("3 5")

    numbers = [*islice(Sampler(temperature=1.0, seed=3).numbers(5), 4)]

    assert numbers == [python.random() for _ in range(4)]


def test_greedy_takes_the_largest_whatever_is_drawn() -> None:
    assert [chosen(GREEDY, u) for u in (0.0, 0.999)] == [1, 1]


def test_numbers_fall_to_ids_by_their_probabilities_one_after_another() -> None:
    inside = P.cumsum(0) - P / 2

    assert [chosen(Sampler(temperature=1.0), float(u)) for u in inside] == [0, 1, 2, 3]


def test_logits_that_are_nearly_equal_draw_the_same_whichever_is_larger() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    shares = logits[0].double().softmax(-1)
    for nudge in (torch.tensor([1e-6, 0, -1e-6, 0]), torch.tensor([-1e-6, 0, 1e-6, 0])):
        inside = shares.cumsum(0) - shares / 2
        assert [chosen(Sampler(temperature=1.0), float(u), logits + nudge) for u in inside] == [0, 1, 2, 3]


def test_the_temperature_divides_the_logits() -> None:
    colder = (LOGITS.double() / 0.5).softmax(-1)[0]

    assert chosen(Sampler(temperature=0.5), float(colder[0]) - 1e-6) == 0
    assert chosen(Sampler(temperature=0.5), float(colder[0]) + 1e-6) == 1


def test_a_temperature_next_to_nothing_is_greedy_and_overflows_nowhere() -> None:
    assert chosen(Sampler(temperature=1e-300), 0.999, LOGITS * 1e4) == 1


def test_top_k_keeps_as_many_with_their_probabilities_made_whole() -> None:
    share = float(P[1] / (P[1] + P[2]))
    sampler = Sampler(temperature=1.0, top_k=2)

    assert [chosen(sampler, u) for u in (share - 1e-6, share + 1e-6, 0.999999)] == [1, 2, 2]
    assert chosen(Sampler(temperature=1.0, top_k=9), 1 - float(P[3]) / 2) == 3


@pytest.mark.parametrize(("top_p", "last"), [(float(P[1]) - 1e-6, 1), (float(P[1]) + 1e-6, 2), (1.0, 3)])
def test_top_p_keeps_as_few_as_reach_it(top_p: float, last: int) -> None:
    assert chosen(Sampler(temperature=1.0, top_p=top_p), 1 - 2.0**-53) == last


@given(u=st.floats(0, 1, exclude_max=True), sizes=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=9))
def test_what_is_drawn_is_never_a_token_of_no_probability(u: float, sizes: list[float]) -> None:
    logits = torch.tensor([[*sizes, float("-inf")]])

    token = chosen(Sampler(temperature=1.0), u, logits)

    assert logits.softmax(-1, dtype=torch.float64)[0, token] > 0


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(temperature=1.0)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_choose_no_token(sampler: Sampler, bad: float) -> None:
    logits = torch.cat([LOGITS, torch.tensor([[0.0, bad, 1.0, 2.0]])])

    ids = sampler.choose(logits, (P[0] + P[1] / 2).expand(2)).tolist()

    assert ids == [1, NOT_FINITE]


def test_the_numbers_of_a_sequence_come_from_its_seed_and_place_alone() -> None:
    def first(seed: int, sequence: int) -> list[float]:
        return list(islice(Sampler(temperature=1.0, seed=seed).numbers(sequence), 4))

    assert first(0, 1) == first(0, 1)
    assert len({*first(0, 0), *first(0, 1), *first(1, 0)}) == 12
    assert all(0 <= u < 1 for u in first(0, 0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")),
        ("top_k", 0), ("top_p", 0.0), ("top_p", 1.5), ("seed", "0"),
    ],
)  # fmt: skip
def test_a_setting_out_of_its_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{field}\n"):
        Sampler(**{field: value})  # type: ignore[arg-type]
