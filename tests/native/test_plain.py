"""Plain torch a block at a time: the bits of the definition, wherever the blocks are cut."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload import devices, native
from qload.devices import tensors
from qload.layouts import NibblePairs, Order, Packing
from qload.spec import Codes
from qload.testing import assert_same_bits
from tests.native.memory import few
from tests.native.test_dequantize import PACKINGS as DEQUANTIZED
from tests.native.test_dequantize import meanings
from tests.native.test_packings import NAMED, drawn

blocks = st.sampled_from(
    [1, 100, 1000, 1 << 19]
)  # codes of a thread: from a granule at a time to all at once


def by_definition(packing: Packing, codes: Tensor) -> Tensor:
    """Each field of each code to its bits: runs to their words, and the words to where they lie."""
    runs = Order(packing.codes.pattern, **dict(packing.codes.sizes)).apply(codes).long()
    words = runs.new_zeros((*runs.shape[:-1], packing.words))
    for f in packing.fields:
        words[..., f.word] |= (runs[..., f.code] >> f.low & (1 << f.width) - 1) << f.bit
    axis = next((axis for axis, group in enumerate(packing.stored) if "w" in group), len(packing.stored) - 1)
    beside = words.movedim(-1, axis + 1).flatten(axis, axis + 1)
    return torch.where(beside < 1 << 31, beside, beside - (1 << 32)).to(torch.int32)


def meant(codes: Codes) -> Tensor:
    """A table row for each output, a column for each input: nothing is shared."""
    numbers = codes.plain().long()
    rows = torch.arange(numbers.shape[0]) if codes.n_group is None else codes.n_group
    rows = rows if codes.scales.shape[0] > 1 else torch.zeros_like(rows)
    columns = torch.zeros(numbers.shape[1], dtype=torch.int64) if codes.k_group is None else codes.k_group

    def each(table: Tensor) -> Tensor:
        return table.float()[rows][:, columns]

    exact = numbers.float() if codes.lookup is None else codes.lookup[numbers]
    exact = exact if codes.zeros is None else exact - each(codes.zeros)
    scaled = exact / each(codes.scales) if codes.divide else exact * each(codes.scales)
    return scaled if codes.factor == 1 else scaled * codes.factor


@pytest.fixture(autouse=True, scope="module")
def blocks_of_a_test() -> Any:
    kept = tensors.BLOCK
    with native.reference():
        yield
    tensors.BLOCK = kept


@pytest.mark.parametrize("name", NAMED)
@few
@given(rows=st.integers(0, 9), columns=st.integers(0, 9), block=blocks, turned=st.booleans())
def test_words(name: str, rows: int, columns: int, block: int, turned: bool) -> None:
    packing, tensors.BLOCK = NAMED[name], block
    codes = drawn(packing, rows, columns)
    want = by_definition(packing, codes)

    assert torch.equal(packing.pack(codes.T.contiguous().T if turned else codes), want)
    assert torch.equal(packing.unpack(want), codes)
    small = torch.empty(codes.shape, dtype=torch.uint8)
    assert packing.unpack(want, out=small) is small
    assert torch.equal(small, codes.to(torch.uint8))


@pytest.mark.parametrize("name", NAMED)
@few
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), block=blocks, turned=st.booleans(), data=st.data())
def test_values(name: str, rows: int, columns: int, block: int, turned: bool, data: Any) -> None:
    packing, tensors.BLOCK = NAMED[name], block
    codes = drawn(packing, rows, columns)
    packed = packing.packed(packing.pack(codes))
    if data.draw(st.booleans()):
        order = torch.randperm(codes.shape[0])
        packed, codes = packed[order], codes[order]  # type: ignore[assignment]
    lookup = torch.randn(2**packing.bits) if data.draw(st.booleans()) else None
    want = (codes.T if turned else codes).float() if lookup is None else lookup[codes.T if turned else codes]

    found = list(devices.values(packed.T if turned else packed, lookup, block))

    assert [rows.start for rows, _ in found[1:]] == [rows.stop for rows, _ in found[:-1]]
    assert_same_bits(torch.cat([part for _, part in found]), want.contiguous())


@pytest.mark.parametrize("name", DEQUANTIZED)
@few
@given(data=st.data(), block=blocks, dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_weights(name: str, data: Any, block: int, dtype: torch.dtype) -> None:
    packing, tensors.BLOCK = DEQUANTIZED[name], block
    K, N = (packing.granule(axis) * data.draw(st.integers(0, 5)) for axis in (0, 1))
    packed = packing.packed(packing.pack(torch.randint(0, 2**packing.bits, (K, N), dtype=torch.int32)))
    codes = Codes(packing.bits, packed.T, **data.draw(meanings(packing.bits, N, K)))

    assert_same_bits(codes.dequantize(dtype).nan_to_num(7), meant(codes).to(dtype).nan_to_num(7))


@given(data=st.data(), block=blocks, high=st.booleans(), N=st.integers(0, 9), half=st.integers(0, 300))
def test_pairs(data: Any, block: int, high: bool, N: int, half: int) -> None:
    tensors.BLOCK = block
    pairs = NibblePairs(torch.randint(0, 256, (N, half + 3), dtype=torch.uint8)[:, 2 : half + 2], high)
    codes = Codes(4, pairs, **data.draw(meanings(4, N, 2 * half)))

    assert_same_bits(codes.dequantize().nan_to_num(7), meant(codes).nan_to_num(7))


def test_gradients_of_scales_pass_through_blocks() -> None:
    tensors.BLOCK = 8
    codes = Codes(
        8, torch.arange(24, dtype=torch.uint8).reshape(4, 6), torch.ones(4, 2), None, torch.arange(6) // 3
    )
    scales = torch.rand(4, 2, requires_grad=True)

    replace(codes, scales=scales).dequantize().sum().backward()

    assert scales.grad is not None
    assert torch.equal(scales.grad, codes.plain().float().reshape(4, 2, 3).sum(-1))


def test_one_word_of_any_stride() -> None:
    words = torch.arange(6, dtype=torch.int32).reshape(3, 2)[1:2, :1].T  # (1, 1), two apart
    packing = NAMED["compressed 4"]

    assert packing.unpack(words).tolist() == [[2, 0, 0, 0, 0, 0, 0, 0]]
    assert packing.packed(words).plain().tolist() == [[2, 0, 0, 0, 0, 0, 0, 0]]
