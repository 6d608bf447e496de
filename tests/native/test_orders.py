"""Elements moved by digit strides: the same bits as torch's permute, whatever the sentence."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload import native
from qload.devices import cpu
from qload.layouts import Order, awq, gptq, marlin, marlin_24
from qload.sentences import Digit
from tests.native.memory import each_isa, few, guarded, isas, offsets, placed, threads

DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64)
ORDERS = [
    pytest.param(marlin.SCALES_GROUPED, id="marlin scales, grouped"),
    pytest.param(marlin.SCALES_PER_COLUMN, id="marlin scales, per column"),
    pytest.param(marlin_24.SCALES_GROUPED, id="marlin 2:4 scales"),
    pytest.param(marlin_24.METADATA, id="2:4 metadata"),
]


@st.composite
def orders(draw: Any) -> tuple[Order, list[int]]:
    """A sentence of up to six digits, and the shape of a tensor that it fits."""
    letters = "abcdef"[: draw(st.integers(1, 6))]
    size = {digit: draw(st.sampled_from([1, 2, 2, 3, 4, 5, 8, 16])) for digit in letters}
    cuts = draw(st.lists(st.integers(1, len(letters)), max_size=3))
    left = [
        letters[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(letters)], strict=True) if a < b
    ]
    right = "".join(draw(st.permutations(letters)))
    sides = [" ".join(f"({' '.join(group)})" for group in side) for side in (left, [right])]
    shape = [torch.Size([size[digit] for digit in group]).numel() for group in left]
    return Order(" -> ".join(sides), **size), shape


def noise(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


@given(drawn=orders(), dtype=st.sampled_from(DTYPES), offset=offsets, count=threads)
def test_any_sentence(drawn: tuple[Order, list[int]], dtype: torch.dtype, offset: int, count: int) -> None:
    order, shape = drawn
    tensor = placed(noise(shape, dtype), offset)

    each_isa(lambda: order.apply(tensor).view(torch.uint8), count)
    each_isa(lambda: order.undo(order.apply(tensor)).view(torch.uint8), count)


@pytest.mark.parametrize("order", ORDERS)
@few
@given(rows=st.integers(0, 5), columns=st.integers(0, 9), count=threads, step=st.integers(1, 3))
def test_scales_and_metadata(order: Order, rows: int, columns: int, count: int, step: int) -> None:
    shape = (rows * order.granule(0), columns * order.granule(1))
    strided = noise((shape[0], shape[1] * step), torch.int16)[:, ::step]

    each_isa(lambda: order.apply(strided), count)
    each_isa(lambda: order.apply(noise(shape[::-1], torch.int16).zero_().T), count)


@given(drawn=orders(), offset=offsets, count=threads)
def test_nothing_around_the_target_is_written(
    drawn: tuple[Order, list[int]], offset: int, count: int
) -> None:
    order, shape = drawn
    tensor = noise(shape, torch.int16)
    for isa in isas():
        with native.using(isa, count), guarded(order.apply(tensor).shape, torch.int16, offset) as out:
            assert order.apply(tensor, out=out) is out


@given(bits=st.sampled_from([2, 4, 8]), data=st.data(), count=threads)
def test_elements_smaller_than_a_byte(bits: int, data: Any, count: int) -> None:
    """Sizes that no power of two divides, so that bytes have several writers unless a thread has them all."""
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 12, 16, 31]), min_size=1, max_size=4))
    total = torch.Size(sizes).numel()
    order = data.draw(st.permutations(range(len(sizes))))
    target = {axis: torch.Size([sizes[i] for i in order[at + 1 :]]).numel() for at, axis in enumerate(order)}
    digits = [
        Digit(size, torch.Size(sizes[axis + 1 :]).numel(), target[axis]) for axis, size in enumerate(sizes)
    ]
    codes = torch.randint(0, 2**bits, (total,), dtype=torch.uint8)
    per = 8 // bits
    short = torch.zeros(-total % per, dtype=torch.uint8)
    shifts = torch.arange(per, dtype=torch.uint8) * bits
    source = (torch.cat([codes, short]).view(-1, per) << shifts).sum(1).to(torch.uint8)
    want = codes.view(sizes).permute(order).flatten()

    for isa in isas():
        with native.using(isa, count), guarded(source.shape, torch.uint8, 1) as out:
            assert cpu.move(source, out, bits, digits)
            got = (out[:, None] >> shifts & (2**bits - 1)).flatten()[:total]
            assert torch.equal(got, want)


@pytest.mark.parametrize("packing", [gptq.rows(4), awq.columns(4), marlin.rows(4)], ids=lambda p: p.pattern)
def test_large_tensors_go_past_the_caches(packing: Any) -> None:
    """What is written in whole registers past the caches is complete when the call returns."""
    words = torch.randint(-(2**31), 2**31, (512 * 2048 // 8,), dtype=torch.int32)
    packed = packing.packed(words.view(packing.pack(torch.zeros(512, 2048, dtype=torch.int32)).shape))

    each_isa(lambda: exchanged(packed), 2)


def exchanged(packed: Any) -> torch.Tensor:
    return torch.cat(
        [target.pack(packed).flatten() for target in (gptq.rows(4), awq.columns(4), marlin.rows(4))]
    )
