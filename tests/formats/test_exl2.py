"""EXL2: a block small enough to check in your head, numpy's half precision, and damage."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import IndexValueError, MismatchError, ShapeError
from qload.formats import Exl2Config, Exl2Weight
from qload.formats.exl2 import as_positions
from qload.testing import assert_same_bits
from tests.formats.exl2_layers import Drawn, draw

pytestmark = pytest.mark.usefixtures("seen_texts")


def by_hand(largest: float = 256) -> Exl2Weight:
    """Four rows of 8 bits: codes 130, 128, 129, 127, which are 2, 0, 1, -1; scale (1 + 1)**2 * 1."""
    return Exl2Weight(
        config=Exl2Config(),
        q_weight=torch.full((1, 32), 0x7F818082, dtype=torch.int32),
        q_scale=torch.full((1, 4), 0x11111111, dtype=torch.int32),
        q_scale_max=torch.tensor([largest], dtype=torch.float16),
        q_groups=torch.tensor([8, 0], dtype=torch.int16),
        q_invperm=torch.tensor([2, 0, 3, 1], dtype=torch.int32),
    )


def test_one_group_by_hand() -> None:
    assert by_hand().dequantize().tolist() == [[4, 8, -4, 0]] * 32


def test_each_column_has_its_four_bits_of_scale() -> None:
    """Nibbles 0 to 7 and 8 to 15: scales are the squares of 1 to 16."""
    weight = by_hand()
    weight.q_scale.copy_(torch.tensor([0x76543210, 0xFEDCBA98 - (1 << 32), 0, 0]))

    assert weight.dequantize()[:16, 0].tolist() == [n * n for n in range(1, 17)]


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2])
def test_every_width_has_its_own_middle(bits: int) -> None:
    drawn = draw((bits, 32))

    assert_same_bits(drawn.weight().dequantize(), drawn.meaning())


MIXED = [(8, 128), (6, 64), (5, 64), (4, 96), (3, 64), (2, 32)]


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(MIXED, id="all widths, the last group short"),
        pytest.param([(8, 128), (4, 32), (4, 32), (4, 8)], id="groups of 128 and 32, and 8 rows"),
        pytest.param([(3, 32), (8, 4), (3, 64)], id="widths that rise again"),
    ],
)
def test_groups_of_mixed_widths_are_streams_one_after_another(groups: list[tuple[int, int]]) -> None:
    drawn = draw(*groups, N=64)

    assert_same_bits(drawn.weight().dequantize(), drawn.meaning())


@pytest.mark.parametrize("flush", [False, True], ids=["", "in a process that flushes float32's"])
def test_subnormal_scales_count(flush: bool) -> None:
    """Below 2**-6 a 256th of q_scale_max is subnormal in fp16: float32 would keep more of it."""
    drawn = draw((4, 64), (3, 32), largest=2.0**-12)
    exact = drawn.tensors["q_scale_max"].float() / 256
    torch.set_flush_denormal(flush)
    try:
        got = drawn.weight().dequantize()
    finally:
        torch.set_flush_denormal(False)

    assert not torch.equal(exact, exact.half().float())
    assert_same_bits(got, drawn.meaning())
    assert got.count_nonzero() > got.numel() // 2


def test_trap_48_q_scale_max_is_divided_once_however_often_a_weight_is_made() -> None:
    """TGI divides the tensor it is given, in place."""
    stored = torch.tensor([0.1], dtype=torch.float16)
    tensors = {**by_hand().fields(), "q_scale_max": stored}
    weights = [Exl2Weight(config=Exl2Config(), **tensors) for _ in range(2)]

    results = [weight.dequantize() for weight in (*weights, *weights)]

    assert stored.tolist() == torch.tensor([0.1], dtype=torch.float16).tolist()
    assert all(torch.equal(result, results[0]) for result in results)


def test_trap_48_inputs_beyond_32767_are_where_they_belong() -> None:
    """Where a permutation of 16 bits turns negative."""
    drawn = draw(*[(4, 4096)] * 9, (4, 3136))

    weight = drawn.weight()

    assert (weight.shape, int(weight.q_invperm.max())) == ((32, 40_000), 39_999)
    assert_same_bits(weight.dequantize(), drawn.meaning())


@pytest.mark.parametrize(
    ("groups", "last"),
    [
        pytest.param(5, 40_000 - (1 << 16), id="up to 65,535: 16 bits without a sign"),
        pytest.param(8, 70_000 - (1 << 16), id="beyond: counted on where a start does not rise"),
    ],
)
def test_groups_begin_beyond_32767_words(groups: int, last: int) -> None:
    """Groups of 40,000 rows of 8 bits; codes 0, which are -128, and scales 1/128 for group 0, 2/128, ..."""
    starts = torch.arange(groups) * 10_000
    order = torch.randperm(groups * 40_000, generator=torch.Generator().manual_seed(0))
    weight = Exl2Weight(
        config=Exl2Config(),
        q_weight=torch.zeros(groups * 10_000, 32, dtype=torch.int32),
        q_scale=torch.zeros(groups, 4, dtype=torch.int32),
        q_scale_max=(torch.arange(groups) * 2 + 2).half(),
        q_groups=torch.stack([torch.full_like(starts, 8), starts], 1).flatten().to(torch.int16),
        q_invperm=order.to(torch.int32),
    )

    assert int(weight.q_groups[-1]) == last
    assert torch.equal(weight.dequantize()[31], -(order // 40_000 + 1.0))


def damaged(**changes: Any) -> tuple[Drawn, dict[str, Tensor]]:
    """Three groups, of 8, 5 and 3 bits from rows 0, 8 and 18 of 24, with some values overwritten."""
    drawn = draw((8, 32), (5, 64), (3, 64))
    tensors = {name: tensor.clone() for name, tensor in drawn.tensors.items()}
    for name, (at, value) in changes.items():
        tensors[name][at] = value
    return drawn, tensors


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        pytest.param(2, 7, "bits of group 1\n  expected 8, 6, 5, 4, 3 or 2\n  got      7", id="7 bits"),
        pytest.param(0, 0, "bits of group 0\n  expected 8, 6, 5, 4, 3 or 2\n  got      0", id="no bits"),
        pytest.param(4, -3, "bits of group 2\n  expected 8, 6, 5, 4, 3 or 2\n  got      -3", id="negative"),
        pytest.param(1, 8, "first row of group 0\n  expected 0\n  got      8", id="a later beginning"),
        pytest.param(
            3, 18, "first row of group 2\n  expected more than 18, where group 1 begins\n  got      18",
            id="no rows",
        ),
        pytest.param(
            3, 20, "first row of group 2\n  expected more than 20, where group 1 begins\n  got      18",
            id="starts that fall",
        ),
        pytest.param(
            5, 24, "first row of group 2\n  expected less than 24, the rows of q_weight\n  got      24",
            id="beyond the words",
        ),
        pytest.param(
            5, -1, "first row of group 2\n  expected less than 24, the rows of q_weight\n  got      65535",
            id="far beyond",
        ),
        pytest.param(
            5, 17, "rows of q_weight in group 1\n  expected a multiple of 5: 32 codes of 5 bits\n"
            "  got      9",
            id="half a run",
        ),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_are_refused_by_number(at: int, value: int, text: str) -> None:
    drawn, tensors = damaged(q_groups=(at, value))

    with pytest.raises(MismatchError) as caught:
        drawn.weight(**tensors)

    assert str(caught.value) == f"Exl2Weight.q_groups: {text}"


def test_groups_whose_rows_are_not_the_inputs_are_refused() -> None:
    drawn, tensors = damaged(q_groups=(0, 4))

    with pytest.raises(
        ShapeError, match=r"q_invperm: wrong shape\n  expected \(192,\) = \(K,\)\n  got      \(160,\)"
    ):
        drawn.weight(**tensors)


def test_no_groups_are_refused() -> None:
    drawn = draw((8, 32))
    none = {name: drawn.tensors[name][:0] for name in ("q_groups", "q_scale", "q_scale_max")}

    with pytest.raises(MismatchError, match="q_groups: no groups"):
        drawn.weight(**none)


@pytest.mark.parametrize("value", [-1, 160, 1 << 30])
def test_an_input_that_is_nowhere_is_refused(value: int) -> None:
    drawn, tensors = damaged(q_invperm=(7, value))

    with pytest.raises(
        IndexValueError,
        match=rf"q_invperm: .*\n  expected 0 <= index < 160, each once\n  got      {value} at 7",
    ):
        drawn.weight(**tensors)


def test_an_input_that_is_there_twice_is_refused() -> None:
    drawn, tensors = damaged()
    tensors["q_invperm"][9] = tensors["q_invperm"][4]

    with pytest.raises(IndexValueError, match=r"each once\n  got      \d+ at 4 \(2 in all\)"):
        drawn.weight(**tensors)


@pytest.mark.parametrize("groups", [MIXED, [(8, 40_000)]], ids=["", "without a sign"])
def test_trap_48_a_permutation_of_16_bits_is_read_as_one_of_32(groups: list[tuple[int, int]]) -> None:
    drawn = draw(*groups)

    short = drawn.weight(q_invperm=drawn.tensors["q_invperm"].to(torch.int16))

    assert_same_bits(short.dequantize(), drawn.meaning())


def test_places_of_sixteen_bits_have_no_sign() -> None:
    stored = torch.tensor([0, 32767, -32768, -1], dtype=torch.int16)

    assert as_positions(stored).tolist() == [0, 32767, 32768, 65535]
    assert as_positions(torch.tensor([-1], dtype=torch.int32)).tolist() == [-1]
