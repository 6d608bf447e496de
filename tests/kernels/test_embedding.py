"""Rows of a quantized matrix: the bits of the whole matrix, read by blocks of rows."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from qload.errors import ArgumentError
from qload.formats import FORMATS as ALL
from qload.formats import Fp8Config, Fp8Weight, MXFP4ExpertsWeight
from qload.kernels import embedding
from qload.kernels.embedding import QuantizedRows, block_rows
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from tests.example_counts import at_most
from tests.format_cases import CONFIGS

FORMATS = [weight_type for weight_type in ALL if weight_type is not MXFP4ExpertsWeight]


def fp8(N: int, K: int, block: tuple[int, int] | None) -> Fp8Weight:
    codes = torch.arange(N * K).reshape(N, K) % 97 - 48
    rows, columns = (N, 1) if block is None else (-(-N // block[0]), -(-K // block[1]))
    scales = torch.arange(1, rows * columns + 1).reshape(rows, columns).float()
    config = Fp8Config("channel") if block is None else Fp8Config("block", block)
    return Fp8Weight(config=config, weight=codes.to(torch.float8_e4m3fn), weight_scale=scales)


@pytest.mark.parametrize("weight_type", FORMATS, ids=lambda weight_type: weight_type.format)
@given(data=st.data(), run=st.sampled_from([1, 1 << 20]))
@at_most(6)
def test_rows_have_the_bits_of_the_whole_matrix(weight_type: type[Weight], data: Any, run: int) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], most=2)).weight()
    assume(len(weight.shape) == 2)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, weight.shape[0] - 1), min_size=1, max_size=6)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding, "RUN_BYTES", run)
        rows = QuantizedRows(weight)(ids[None], torch.float32)

    assert_same_bits(rows, weight.dequantize()[ids][None])


@pytest.mark.parametrize(
    ("block", "size", "read"), [(None, 1, [0, 5, 7]), ((4, 8), 4, [0, 1, 2, 3, 4, 5, 6, 7])]
)
def test_only_the_blocks_of_the_rows_are_dequantized(
    block: tuple[int, int] | None, size: int, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, seen = fp8(10, 16, block), list[Weight]()
    dequantize = Fp8Weight.dequantize
    monkeypatch.setattr(
        Fp8Weight, "dequantize", lambda self, *rest: (seen.append(self), dequantize(self, *rest))[1]
    )

    QuantizedRows(weight)(torch.tensor([7, 0, 5, 0]), torch.float32)

    assert block_rows(weight) == size
    assert [each.weight.float().tolist() for each in seen] == [weight.weight[read].float().tolist()]


def test_the_last_block_of_rows_may_be_short() -> None:
    weight = fp8(10, 16, (4, 8))

    rows = QuantizedRows(weight)(torch.tensor([9, 8]), torch.float32)

    assert_same_bits(rows, weight.dequantize()[[9, 8]])


@pytest.mark.parametrize("wrong", [-1, 10])
def test_an_id_without_a_row_is_refused(wrong: int) -> None:
    with pytest.raises(ArgumentError, match=rf"ids\n  expected 0 to 9\n  got      {wrong}"):
        QuantizedRows(fp8(10, 16, None))(torch.tensor([3, wrong]), torch.float32)


def test_rows_follow_their_module_and_no_cast() -> None:
    module = QuantizedRows(fp8(10, 16, None))
    before = module(torch.tensor([1]), torch.float32)

    moved = module.to(torch.bfloat16)

    assert {each.dtype for each in moved.buffers()} == {torch.float8_e4m3fn, torch.float32}
    assert_same_bits(moved(torch.tensor([1]), torch.float32), before)
    assert moved(torch.tensor([1]), torch.bfloat16).dtype == torch.bfloat16
    assert "10, 16, fp8" in repr(moved)
