"""EETQ's bytes, an element at a time."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qload.errors import ArgumentError, PatternError
from qload.layouts import eetq
from qload.testing import assert_same_bits


@pytest.mark.parametrize(
    ("n", "k", "byte"),
    [
        pytest.param(0, 0, 0, id="origin"),
        pytest.param(0, 8, 1, id="rows 8 apart are neighbours"),
        pytest.param(0, 1, 2, id="then the next row"),
        pytest.param(0, 9, 3, id="and the one 8 apart from it: a word"),
        pytest.param(0, 2, 4, id="the next two rows are the next word"),
        pytest.param(0, 15, 15, id="16 rows are 16 bytes"),
        pytest.param(0, 16, 16, id="then the next 16 rows"),
        pytest.param(0, 63, 63, id="64 rows of an output"),
        pytest.param(1, 0, 64, id="then the same rows of the next output"),
        pytest.param(0, 64, 128, id="then the next 64 rows of both"),
        pytest.param(2, 0, 256, id="a pair of outputs has 2 * K bytes"),
        pytest.param(63, 127, 128 * 64 - 1, id="to the last"),
    ],
)
def test_one_element(n: int, k: int, byte: int) -> None:
    codes = torch.zeros(64, 128, dtype=torch.int32)
    codes[n, k] = 200

    stored = eetq.pack(codes)

    assert (stored.dtype, tuple(stored.shape)) == (torch.int8, (128, 64))
    assert stored.flatten().nonzero().tolist() == [[byte]]
    assert int(stored.flatten()[byte]) == 200 - 256


@given(data=st.data())
@settings(max_examples=20)
def test_what_is_packed_is_unpacked_again(data: Any) -> None:
    N, K = (64 * data.draw(st.integers(1, 3)) for _ in range(2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    stored = torch.randint(-128, 128, (K, N), dtype=torch.int8, generator=generator)

    codes = eetq.unpack(stored)

    assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (N, K))
    assert_same_bits(eetq.pack(codes), stored)
    assert sorted(codes.flatten().tolist()) == sorted((stored.flatten().int() % 256).tolist())


def test_bytes_are_read_where_they_lie_and_not_where_a_view_of_them_says() -> None:
    stored = torch.arange(64 * 64).reshape(64, 64).to(torch.int8)

    assert_same_bits(eetq.unpack(stored.T.contiguous().T), eetq.unpack(stored))


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("code", [-1, 256])
def test_a_code_that_is_no_byte_is_refused(code: int) -> None:
    with pytest.raises(ArgumentError, match="expected 0 <= code < 256"):
        eetq.pack(torch.full((64, 64), code))


@pytest.mark.usefixtures("seen_texts")
def test_inputs_that_fill_no_tile_are_refused() -> None:
    with pytest.raises(PatternError, match="has to be a multiple of 64, got 32"):
        eetq.pack(torch.zeros(64, 32, dtype=torch.int32))


@pytest.mark.parametrize("capability", [75, 80, 86, 89])
def test_the_bytes_are_the_same_for_all_that_eetq_writes_for(capability: int) -> None:
    assert eetq.order(capability) is eetq.BYTES


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("capability", [70, 90, 100])
def test_a_gpu_that_eetq_writes_nothing_for_is_refused(capability: int) -> None:
    with pytest.raises(ArgumentError, match=f"no bytes for sm90 and later\n  got      sm{capability}"):
        eetq.order(capability)
