"""Refusals of integers that do not fit a layout, with their numbers, and the nearest integers that do."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from qload.errors import RepackError
from qload.formats import AWQWeight, CTPackWeight, GPTQConfig, GPTQWeight, Marlin24Weight, MarlinWeight
from qload.layouts import STORED_MINUS_ONE, Stored
from qload.spec.integers import Integers, IntegerWeight, Origin
from qload.spec.weight import Layer

pytestmark = pytest.mark.usefixtures("seen_texts")


def integers(
    bits: int = 4,
    N: int = 64,
    K: int = 128,
    size: int = 32,
    zero: int | None = None,
    dtype: torch.dtype = torch.float16,
    **values: Any,
) -> Integers:
    """Return integers whose last zero point is `zero`, and all others the middle."""
    groups = 1 if size == -1 else -(-K // size)
    zeros = torch.full((groups, N), 2 ** (bits - 1), dtype=torch.int32)
    zeros[-1, -1] = zeros[-1, -1] if zero is None else zero
    g_idx = torch.zeros(K, dtype=torch.int32) if size == -1 else torch.arange(K, dtype=torch.int32) // size
    codes = torch.full((K, N), 2 ** (bits - 1), dtype=torch.int32)
    made = Integers(
        bits=bits,
        group_size=size,
        unpack=lambda: codes,
        scales=torch.ones(groups, N, dtype=dtype),
        zeros=zeros,
        g_idx=g_idx,
        layer=Layer((N,), K, (N, K), origin=Origin(GPTQWeight, "none")),
    )
    return replace(made, **values)


ACT_ORDER = {"g_idx": torch.arange(128, dtype=torch.int32).flip(0) // 32}
NO_INDEX = "the rows of its groups are not in order along K (act order), and {} has no g_idx"
DENSE = "a Marlin checkpoint"

REFUSED: list[tuple[type[IntegerWeight], Integers, str]] = [
    (AWQWeight, integers(3, N=64), "awq has 4 or 8 bits, got 3"),
    (AWQWeight, integers(N=60), "N = 60 is not a multiple of 8: short words"),
    (AWQWeight, integers(8, N=62), "N = 62 is not a multiple of 4: short words"),
    (AWQWeight, integers(**ACT_ORDER), NO_INDEX.format("awq")),
    (AWQWeight, integers(K=100), "K = 100 does not divide into groups of 32"),
    (AWQWeight, integers(zero=16), "a zero point of 16 does not fit 4 bits"),
    (AWQWeight, integers(8, zero=256), "a zero point of 256 does not fit 8 bits"),
    (CTPackWeight, integers(zero=16), "a zero point of 16 does not fit 4 bits"),
    (CTPackWeight, integers(zero=-1), "a zero point of -1 does not fit 4 bits"),
    (CTPackWeight, integers(group_size=64), "4 groups of K = 128 are not of 64 inputs each"),
    (CTPackWeight, integers(group_size=0), "4 groups of K = 128 are not of 0 inputs each"),
    (CTPackWeight, integers(group_size=-1), "4 groups of K = 128 are not of -1 inputs each"),
    (GPTQWeight, integers(N=60), "N = 60 is not a multiple of 8: short words"),
    (GPTQWeight, integers(K=124, size=-1), "K = 124 is not a multiple of 8: short words"),
    (GPTQWeight, integers(3, N=48), "N = 48 is not a multiple of 32: short words"),
    (GPTQWeight, integers(2, N=24), "N = 24 is not a multiple of 16: short words"),
    (GPTQWeight, integers(zero=16), "a zero point of 16 is above 15"),
    (GPTQWeight, integers(zero=-1), "a zero point of -1 is below 0"),
    (MarlinWeight, integers(2), f"{DENSE} has 4 or 8 bits, got 2"),
    (MarlinWeight, integers(N=96), "needs K, N in multiples of 16, 64; got 128, 96"),
    (MarlinWeight, integers(K=136, size=-1), "needs K, N in multiples of 16, 64; got 136, 64"),
    (MarlinWeight, integers(**ACT_ORDER), NO_INDEX.format(DENSE)),
    (MarlinWeight, integers(8, zero=9), f"a zero point is not 128, and {DENSE} stores no zero points"),
    (MarlinWeight, integers(dtype=torch.float32), "needs scales in float16 or bfloat16, got float32"),
    (Marlin24Weight, integers(2), "needs 4 or 8 bits, got 2"),
    (Marlin24Weight, integers(K=48, size=-1), "needs K, N in multiples of 32, 64; got 48, 64"),
    (Marlin24Weight, integers(zero=9), "a zero point is not 8, and marlin_24 stores no zero points"),
]


@pytest.mark.parametrize(("kind", "given", "reason"), REFUSED)
def test_what_a_layout_cannot_represent_is_refused(
    kind: type[IntegerWeight], given: Integers, reason: str
) -> None:
    with pytest.raises(RepackError) as caught:
        kind.from_integers(given)

    assert caught.value.reason == reason
    assert caught.value.source == "gptq"


TAKEN: list[tuple[type[IntegerWeight], Integers]] = [
    (AWQWeight, integers(N=8, zero=15)),
    (AWQWeight, integers(8, N=4, zero=0)),
    (CTPackWeight, integers(N=3, zero=15)),
    (CTPackWeight, integers(N=3, zero=0)),
    (CTPackWeight, integers(K=100, N=3)),
    (CTPackWeight, integers(K=100, N=3, size=-1)),
    (GPTQWeight, integers(N=8, K=8, size=-1, zero=15)),
    (GPTQWeight, integers(N=8, zero=0)),
    (GPTQWeight, integers(3, N=32, **ACT_ORDER)),
    (MarlinWeight, integers(K=16, size=-1)),
    (MarlinWeight, integers(8, dtype=torch.bfloat16)),
    (Marlin24Weight, integers(K=64, size=-1)),
]


@pytest.mark.parametrize(("kind", "given"), TAKEN)
def test_the_nearest_that_fits_is_converted_exactly(kind: type[IntegerWeight], given: Integers) -> None:
    weight = kind.from_integers(given)

    values = given.scales[given.g_idx.long()].float() * (given.unpack() - given.zeros[given.g_idx.long()])  # type: ignore[operator]
    assert torch.equal(weight.dequantize(), values.T)


def test_zero_points_are_written_in_the_convention_that_is_given() -> None:
    for zeros, words in ((None, 0x77777777), (Stored(), -0x77777778), (STORED_MINUS_ONE, 0x77777777)):
        assert GPTQWeight.from_integers(integers(), zeros=zeros).qzeros[0, 0] == words
    origin = Origin(GPTQWeight, GPTQConfig(4, 32, Stored()))
    assert GPTQWeight.from_integers(integers(), origin).qzeros[0, 0] == -0x77777778
    assert GPTQWeight.from_integers(integers(), origin, STORED_MINUS_ONE).qzeros[0, 0] == 0x77777777
