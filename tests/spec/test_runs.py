"""Groups of one size, one after another."""

import pytest
import torch

from qload.spec import run_of


@pytest.mark.parametrize(
    ("groups", "run"),
    [
        ([0, 0, 1, 1, 2, 2], 2),
        ([0, 0, 0, 1, 1], 3),
        ([0, 0, 0], 3),
        ([0, 1, 2], 1),
        ([0, 0, 1, 1, 1], 0),
        ([0, 1, 0, 1], 0),
        ([1, 1, 0, 0], 0),
        ([1, 1, 2, 2], 0),
    ],
)
def test_a_run_is_what_all_groups_have(groups: list[int], run: int) -> None:
    assert run_of(torch.tensor(groups)) == run


def test_values_that_are_not_there_say_nothing() -> None:
    assert run_of(torch.zeros(4, device="meta")) == 0
