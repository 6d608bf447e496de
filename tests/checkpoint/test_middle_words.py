"""Words of zero points in the middle of the codes, against those that each convention writes."""

import pytest
import torch

from qload import Stored, StoredMinusOne, StoredMinusOnePerField, StoredMinusOneUnmasked, ZeroPoints
from qload.checkpoint.layer_info import middle_words
from qload.layouts import awq, gptq

CONVENTIONS = (Stored(), StoredMinusOne(), StoredMinusOnePerField(), StoredMinusOneUnmasked())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zeros", CONVENTIONS, ids=lambda zeros: zeros.name)
@pytest.mark.parametrize("outputs", [32, 96])
def test_words_of_middle_zero_points_are_those_that_the_convention_writes(
    bits: int, zeros: ZeroPoints, outputs: int
) -> None:
    packing = gptq.columns(bits)
    written = zeros.write(torch.full((1, outputs), 2 ** (bits - 1)), packing)

    assert middle_words(zeros, packing, outputs).tolist() == written[0].tolist()


def test_words_of_middle_zero_points_do_not_depend_on_the_order_of_awq() -> None:
    packing = awq.columns(4)
    written = Stored().write(torch.full((1, 64), 8), packing)

    assert middle_words(Stored(), packing, 64).tolist() == written[0].tolist()
