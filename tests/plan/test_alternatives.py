"""What else can be done with a layer that ranks cannot share, and what that costs them."""

import pytest

from qload import Weights, plan
from qload.errors import DivideError
from qload.parallel import Rank
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


def shares_by_trying(granules: int, ranks: int) -> list[int]:
    """The granules of each rank where all but the last have equally many, as few as will do."""
    each = next(each for each in range(1, granules + 1) if each * ranks >= granules)
    return [min(each, max(0, granules - each * rank)) for rank in range(ranks)]


# Granules of 8 outputs, or of 64 inputs.
CUTS = {"up_proj": (64, 8, "outputs"), "down_proj": (64, 64, "inputs")}


@pytest.mark.parametrize("prefix", CUTS)
@pytest.mark.parametrize("ranks", range(2, 8))
@pytest.mark.parametrize("granules", range(2, 13))  # one group of inputs is cut at words
def test_uneven_shares_are_offered_where_every_rank_has_some(granules: int, ranks: int, prefix: str) -> None:
    other, block, what = CUTS[prefix]
    size = granules * block
    held = gptq(other, size, prefix) if what == "outputs" else gptq(size, other, prefix)
    shares = [each * block for each in shares_by_trying(granules, ranks)]
    first, last = shares[0], shares[-1]

    share = plan(held, tp=ranks).layers[0].shares[ranks]
    found = {each.kind: each.text for each in share.alternatives}

    assert share.fits == (first == last)
    assert ("uneven" in found) == (0 < last < first)
    if "uneven" in found:
        assert found["uneven"] == (
            f"{first} {what} for each rank but the last, which has {last}: whole blocks of {block}"
        )
    assert ("padded" in found) == (first != last)
    if "padded" in found:
        zeros = first * ranks - size
        assert f"= {first * ranks}, {zeros} {what} of zeros, {first} for each rank" in found["padded"]


@pytest.mark.parametrize("ranks", range(2, 8))
@pytest.mark.parametrize("granules", range(1, 13))
def test_a_short_last_share_loads_where_uneven_shares_are_offered(granules: int, ranks: int) -> None:
    held = gptq(64, 8 * granules, "up_proj")
    shares = shares_by_trying(granules, ranks)

    for rank, granules_of_rank in enumerate(shares):
        weights = Weights(held.storage, loader=held.loader, process_group=Rank(rank, ranks))
        if shares[-1]:
            assert weights.get_partial_weights_col("up_proj").shape == (8 * granules_of_rank, 64)
        else:
            with pytest.raises(DivideError, match="none of them empty"):
                weights.get_partial_weights_col("up_proj")
