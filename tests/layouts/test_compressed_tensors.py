"""compressed-tensors' words: dense or by words, short at their end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.errors import MismatchError
from qload.layouts import NibblePairs, compressed_tensors, fp4


@pytest.mark.parametrize(
    ("dense", "words"),
    [
        pytest.param(True, [0b11 << 30 | 0b001, 0b1], id="dense: the eleventh code straddles two words"),
        pytest.param(False, [0b001, 0b111], id="by words: the eleventh code begins the second word"),
    ],
)
def test_eleven_codes_of_three_bits(dense: bool, words: list[int]) -> None:
    codes = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]])

    packed = compressed_tensors.pack(codes, 3, dense)

    assert (packed.long() & 0xFFFFFFFF).tolist() == [words]
    assert compressed_tensors.unpack(packed, 11, 3, dense).tolist() == codes.tolist()


@given(
    bits=st.sampled_from(compressed_tensors.BITS),
    dense=st.booleans(),
    count=st.integers(1, 80),
    seed=st.integers(0, 99),
)
def test_packing_has_an_inverse_at_every_length(bits: int, dense: bool, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (3, count), generator=generator, dtype=torch.int32)

    packed = compressed_tensors.pack(codes, bits, dense)

    assert packed.shape == (3, compressed_tensors.words(count, bits, dense))
    assert compressed_tensors.capacity(packed.shape[1], bits, dense) >= count
    assert torch.equal(compressed_tensors.unpack(packed, count, bits, dense), codes)


@given(bits=st.sampled_from(compressed_tensors.BITS), count=st.integers(1, 80))
def test_both_packings_are_alike_where_they_say_so_and_nowhere_else(bits: int, count: int) -> None:
    codes = torch.full((1, count), 2**bits - 1)

    same = torch.equal(
        compressed_tensors.pack(codes, bits, True),
        compressed_tensors.pack(codes, bits, False)[:, : len(codes[0])],
    )

    assert same == compressed_tensors.packings_agree(count, bits)


@pytest.mark.parametrize(
    ("counts", "dense"),
    [
        pytest.param([(64, 6)], True, id="dense"),
        pytest.param([(64, 7)], False, id="by words"),
        pytest.param([(10, 1)], True, id="alike"),
        pytest.param([(20, 2), (64, 7)], False, id="one of two tells"),
        pytest.param([(64, 5)], True, id="neither, and nothing said"),
    ],
)
def test_three_bits_are_packed_as_their_words_tell(counts: list[tuple[int, int]], dense: bool) -> None:
    assert compressed_tensors.is_dense("a.words", counts, 3, None) is dense


@pytest.mark.usefixtures("seen_texts")
def test_where_both_packings_fit_somebody_has_to_say_which() -> None:
    for said in (True, False):
        assert compressed_tensors.is_dense("a.words", [(20, 2)], 3, said) is said
    with pytest.raises(MismatchError, match=r"a\.words: two packings of 3 bits fit"):
        compressed_tensors.is_dense("a.words", [(20, 2)], 3, None)


def test_every_value_of_e2m1_by_its_bits() -> None:
    """A sign, two bits of exponent with a bias of 1, one of mantissa."""
    for code, value in enumerate(fp4.E2M1):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        assert value == (-size if sign else size)


def test_the_first_of_two_codes_lies_in_the_low_bits() -> None:
    two = torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)

    assert NibblePairs(two, high_first=False).plain().tolist() == [[1, 2, 0, 15]]
    assert fp4.pack(torch.tensor([[1, 2, 0, 15]])).tolist() == [[0x21, 0xF0]]


def test_codes_mean_by_their_bits_what_the_table_says() -> None:
    assert fp4.values(torch.device("cpu")).tolist() == list(fp4.E2M1)


@pytest.mark.parametrize("high_first", [False, True])
def test_codes_as_numbers_are_those_that_are_looked_up(high_first: bool) -> None:
    pairs = NibblePairs(torch.arange(256).to(torch.uint8).reshape(8, 32), high_first)

    values = [found for _, found in pairs.values(torch.arange(16.0), 64)]

    assert torch.equal(torch.cat(values), pairs.plain().float())


def test_exponents_are_exact_to_both_ends_and_255_is_no_number() -> None:
    powers = fp4.e8m0(torch.arange(256).to(torch.uint8))

    assert powers[:255].tolist() == [2.0 ** (exponent - 127) for exponent in range(255)]
    assert powers[255].isnan()
