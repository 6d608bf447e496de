"""Layouts as sentences: what a sentence may say, that every one has an inverse, and one tile of each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from qload.errors import ArgumentError, PatternError
from qload.layouts import (
    STORED_MINUS_ONE,
    Order,
    Packing,
    Stored,
    StoredMinusOnePerField,
    StoredMinusOneUnmasked,
    ZeroPoints,
    awq,
    compressed_tensors,
    eetq,
    exl2,
    exllama,
    fp4,
    gptq,
    marlin,
    marlin_24,
    panels,
    strips,
)
from qload.layouts.exl2 import Exl2Groups
from qload.testing import assert_same_bits
from tests.example_counts import at_most

PACKINGS = [
    *[pytest.param(gptq.rows(bits), id=f"gptq rows {bits}") for bits in (2, 3, 4, 8)],
    *[pytest.param(gptq.columns(bits), id=f"gptq columns {bits}") for bits in (2, 3, 4, 8)],
    *[pytest.param(awq.columns(bits), id=f"awq {bits}") for bits in (4, 8)],
    *[pytest.param(exllama.rows(bits), id=f"exllama {bits}") for bits in (2, 3, 4, 8)],
]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("pattern", "sizes", "text"),
    [
        pytest.param("a b", {}, "needs exactly one '->'", id="no arrow"),
        pytest.param("a -> a -> a", {}, "needs exactly one '->'", id="two arrows"),
        pytest.param("a b -> a", {}, "b stands on one side only: not a permutation", id="a digit lost"),
        pytest.param("a -> a b", {}, "b stands on one side only: not a permutation", id="a digit invented"),
        pytest.param("a a -> a", {}, "a stands twice on one side", id="a digit twice"),
        pytest.param("(a (b) -> a b", {}, "a parenthesis inside a parenthesis", id="nested"),
        pytest.param("(a b -> a b", {}, "'(' without ')'", id="not closed"),
        pytest.param("a) b -> a b", {}, "')' without '('", id="not opened"),
        pytest.param("() a -> a", {}, "an empty parenthesis", id="empty"),
        pytest.param("a 2 -> a", {}, "cannot read '2'", id="a number"),
        pytest.param("a -> a", {"b": 2}, "has no b, but a size for it", id="a size for no digit"),
        pytest.param("(a b) -> a b", {"b": 0}, "b needs a size of at least 1, got 0", id="a size of 0"),
        pytest.param(
            "(a b) -> a b", {}, "(a b) leaves a and b open: give all sizes but one", id="two unknown"
        ),
        pytest.param("a b -> (a b)", {}, "(a b) leaves a and b open", id="two unknown in the inverse"),
    ],
)
def test_a_sentence_that_is_no_permutation_is_refused(pattern: str, sizes: dict[str, int], text: str) -> None:
    with pytest.raises(PatternError) as caught:
        Order(pattern, **sizes)

    assert str(caught.value).startswith(f"{pattern!r}: ")
    assert text in str(caught.value)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((12,), r"needs 2 axes, got shape \(12,\)"),
        ((13, 2), r"axis \(a b\) has to be a multiple of 4, got 13 in shape \(13, 2\)"),
        ((12, 3), r"axis \(c\) has to be 2, got 3"),
    ],
)
def test_a_tensor_that_a_sentence_does_not_fit_is_refused(shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(PatternError, match=text):
        Order("(a b) c -> a (c b)", b=4, c=2).apply(torch.zeros(shape))


def test_a_sentence_moves_each_element_where_it_says() -> None:
    order = Order("(a b) c -> c (b a)", b=3)

    moved = order.apply(torch.arange(12).reshape(6, 2))

    assert moved.tolist() == [[0, 6, 2, 8, 4, 10], [1, 7, 3, 9, 5, 11]]
    assert order.undo(moved).flatten().tolist() == list(range(12))


@given(data=st.data())
@at_most(60)
def test_every_sentence_read_backwards_is_its_inverse(data: Any) -> None:
    digits = data.draw(st.permutations("abcd"))
    sizes = {digit: data.draw(st.integers(1, 4)) for digit in "abcd"}
    left = data.draw(st.sampled_from(["a b c d", "(a b) c d", "(a b) (c d)", "(a b c d)"]))
    right = data.draw(st.sampled_from(["{} {} {} {}", "({} {}) {} {}", "({} {} {}) {}"])).format(*digits)
    order = Order(f"{left} -> {right}", **sizes)
    count = torch.tensor(list(sizes.values())).prod().item()
    shape = [torch.tensor([sizes[digit] for digit in group]).prod().item() for group in order.left]
    tensor = torch.arange(int(count)).reshape([int(extent) for extent in shape])

    assert torch.equal(order.undo(order.apply(tensor)), tensor)
    assert sorted(order.apply(tensor).flatten().tolist()) == list(range(int(count)))


@pytest.mark.parametrize(
    "function",
    [
        *(gptq.rows, gptq.columns, awq.columns, exllama.rows, exl2.rows, exl2.kernel_rows),
        *(marlin.rows, marlin.zeros, marlin_24.rows, panels.rows, strips.rows),
        *(lambda bits: compressed_tensors.rows(bits, dense=True), lambda bits: strips.group_scales(8 * bits)),
    ],
)  # fmt: skip
def test_a_sentence_is_read_once(function: Callable[[int], Packing | Order]) -> None:
    assert function(8) is function(8)
    assert function(8) is not function(4)


@pytest.mark.parametrize(
    ("packing", "granules"),
    [
        (gptq.rows(4), (8, 1)), (gptq.rows(3), (32, 1)), (gptq.rows(2), (16, 1)), (gptq.columns(8), (1, 4)),
        (awq.columns(4), (1, 8)), (exllama.rows(4), (8, 1)), (exllama.rows(3), (32, 1)),
    ],
)  # fmt: skip
def test_where_codes_may_be_cut_follows_from_the_sentence(
    packing: Packing, granules: tuple[int, int]
) -> None:
    assert (packing.granule(0), packing.granule(1)) == granules


@pytest.mark.parametrize("packing", PACKINGS)
@given(data=st.data())
@at_most(15)
def test_unpack_is_the_inverse_of_pack_and_pack_of_unpack(packing: Packing, data: Any) -> None:
    rows, columns = (packing.granule(axis) * data.draw(st.integers(1, 3)) for axis in (0, 1))
    codes = torch.randint(0, 2**packing.bits, (rows, columns), dtype=torch.int32)

    words = packing.pack(codes)

    assert words.dtype == torch.int32
    assert words.numel() * 32 == codes.numel() * packing.bits
    assert_same_bits(packing.unpack(words), codes)
    anything = torch.randint(-(2**31), 2**31, words.shape, dtype=torch.int32)
    assert_same_bits(packing.pack(packing.unpack(anything)), anything)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("code", [-1, 16])
def test_a_code_that_does_not_fit_is_refused(code: int) -> None:
    with pytest.raises(ArgumentError, match="expected 0 <= code < 16"):
        gptq.rows(4).pack(torch.full((8, 1), code))


@pytest.mark.usefixtures("seen_texts")
def test_words_are_32_bits() -> None:
    with pytest.raises(ArgumentError, match="expected dtype int32"):
        gptq.rows(4).unpack(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="a multiple of 3 along axis 0"):
        gptq.rows(3).unpack(torch.zeros(4, 1, dtype=torch.int32))


@pytest.mark.usefixtures("seen_texts")
def test_codes_that_do_not_fill_their_words_are_refused() -> None:
    with pytest.raises(PatternError, match="8 codes of 3 bits do not fill 1 words of 32"):
        Packing(3, "(kp i) n -> kp n (i)", i=8)


@pytest.mark.parametrize(
    "zeros", [Stored(), STORED_MINUS_ONE, StoredMinusOneUnmasked()], ids=lambda z: z.name
)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_zero_point_convention_has_an_inverse(zeros: Any, bits: int) -> None:
    packing = gptq.columns(bits)
    words = torch.randint(-(2**31), 2**31, (5, bits), dtype=torch.int32)

    logical = zeros.read(words, packing)

    lowest = 1 if isinstance(zeros, StoredMinusOneUnmasked) else 0
    assert (int(logical.min()), int(logical.max())) >= (lowest, lowest)
    assert int(logical.max()) < 2**bits + lowest
    assert_same_bits(zeros.write(logical, packing), words)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zeros", [Stored(), STORED_MINUS_ONE], ids=lambda z: z.name)
def test_every_zero_point_can_be_said(zeros: Any, bits: int) -> None:
    packing = gptq.columns(bits)
    logical = torch.arange(2**bits * 32, dtype=torch.int32).reshape(-1, 32) % 2**bits

    assert_same_bits(zeros.read(zeros.write(logical, packing), packing), logical)


CONVENTIONS = [Stored(), STORED_MINUS_ONE, StoredMinusOnePerField(), StoredMinusOneUnmasked()]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zeros", CONVENTIONS, ids=lambda z: z.name)
def test_zero_points_are_written_where_they_can_be_said_and_refused_elsewhere(
    zeros: ZeroPoints, bits: int, dtype: torch.dtype
) -> None:
    packing = gptq.columns(bits)
    lowest = 1 if isinstance(zeros, StoredMinusOneUnmasked) else 0
    highest = 2**bits - 1 + lowest

    for value in (lowest, lowest + 1, highest - 1, highest):
        if value <= torch.iinfo(dtype).max:
            written = zeros.write(torch.full((1, 32), value, dtype=dtype), packing)
            assert zeros.read(written, packing).tolist() == [[value] * 32]
    for beyond in (lowest - 1, highest + 1, highest + 2):
        if torch.iinfo(dtype).min <= beyond <= torch.iinfo(dtype).max:
            points = torch.full((1, 32), lowest, dtype=dtype)
            points[0, 17] = beyond
            with pytest.raises(ArgumentError, match=r"(zeros|codes)\n  expected "):
                zeros.write(points, packing)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("zeros", CONVENTIONS, ids=lambda z: z.name)
@pytest.mark.parametrize("value", [3.7, 3.0, float("nan"), True])
def test_zero_points_are_integers(zeros: ZeroPoints, value: Any) -> None:
    for bits in (3, 4):
        with pytest.raises(ArgumentError, match="expected integers"):
            zeros.write(torch.full((1, 32), value), gptq.columns(bits))


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("zeros", CONVENTIONS, ids=lambda z: z.name)
def test_words_and_packings_of_another_type_are_refused(zeros: ZeroPoints) -> None:
    words, packing = torch.zeros(1, 4, dtype=torch.int32), gptq.columns(4)

    with pytest.raises(ArgumentError, match=r"words\n  expected a tensor of dtype int32"):
        zeros.read(words.tolist(), packing)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"packing\n  expected a Packing"):
        zeros.read(words, 4)  # type: ignore[arg-type]


OF_FOUR_BITS = Exl2Groups.read(torch.tensor([4, 0]), 4)  # one group of 32 rows in 4 words

# A packer of codes, and the shape and the number of codes that it takes.
PACKERS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int], int]] = {
    "words of rows": (gptq.rows(4).pack, (32, 64), 16),
    "words of columns": (gptq.columns(8).pack, (32, 64), 256),
    "awq": (awq.columns(4).pack, (32, 64), 16),
    "compressed-tensors": (lambda codes: compressed_tensors.pack(codes, 4, dense=False), (32, 60), 16),
    "compressed-tensors, dense": (lambda codes: compressed_tensors.pack(codes, 3, dense=True), (32, 64), 8),
    "four-bit floats": (fp4.pack, (32, 64), 16),
    "eetq": (eetq.pack, (64, 64), 256),
    "exl2": (OF_FOUR_BITS.pack, (32, 64), 16),
    "exl2, shuffled": (lambda codes: OF_FOUR_BITS.pack(codes, shuffle=True), (32, 64), 16),
}


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(("pack", "shape", "count"), PACKERS.values(), ids=PACKERS)
def test_every_packer_takes_whole_codes_that_fit_and_nothing_else(
    pack: Callable[[Tensor], Tensor], shape: tuple[int, int], count: int
) -> None:
    pack(torch.full(shape, count - 1))
    for value in (3.7, 3.0, float("nan"), True, 1j):
        with pytest.raises(ArgumentError, match="codes\n  expected integers"):
            pack(torch.full(shape, value))
    for beyond in (-1, count):
        codes = torch.zeros(shape, dtype=torch.int32)
        codes[-1, -1] = beyond
        with pytest.raises(ArgumentError, match=f"codes\n  expected 0 <= code < {count}"):
            pack(codes)


@pytest.mark.parametrize("packing", PACKINGS)
def test_repacked_words_are_pinned(packing: Packing, golden: SnapshotAssertion) -> None:
    """Codes counted through the smallest tile of two runs, as words in hexadecimal."""
    rows, columns = (max(packing.granule(axis), 2) for axis in (0, 1))
    codes = torch.arange(rows * columns).reshape(rows, columns) * 5 % 2**packing.bits

    words = packing.pack(codes)

    assert "\n".join(" ".join(f"{word & 0xFFFFFFFF:08x}" for word in row) for row in words.tolist()) == golden


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("beyond", [-1, 0])
def test_the_first_code_that_does_not_fit_is_refused(bits: int, beyond: int) -> None:
    codes = torch.zeros(32, 8, dtype=torch.int32)
    codes[7, 3] = beyond or 2**bits

    with pytest.raises(ArgumentError, match=rf"0 <= code < {2**bits}"):
        gptq.rows(bits).pack(codes)
