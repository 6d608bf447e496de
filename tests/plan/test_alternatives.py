"""What else can be done with a layer that ranks cannot share, and what that costs them."""

from qload import plan
from tests.plan.test_plan import gptq, kinds


def test_outputs_that_do_not_divide_into_words_by_hand() -> None:
    """Three words of 8 outputs on two ranks: two and one, or four of which one is zero."""
    word = 4 * 64 + 4 + 2 * 8  # bytes of codes, zero points and scales of 8 outputs, of a group of 64 inputs

    found = kinds(plan(gptq(64, 24, "up_proj"), tp=2), 2)

    assert {kind: each.bytes for kind, each in found.items()} == {
        "uneven": 2 * word - 3 * word // 2,
        "padded": 2 * word - 3 * word // 2,
        "whole": 3 * word - 3 * word // 2,
    }
