"""Integers with float offsets in strips by the CUDA module, computed by hand on CPU tensors."""

from typing import Any

import pytest
import torch

from qload.errors import ArgumentError
from qload.kernel_formats import StripsWeight
from qload.kernels.cuda import large, linear, marlin, mma_gemm
from qload.kernels.cuda.dispatch import why_not_on
from qload.kernels.cuda.linear import call_of
from qload.kernels.dtypes import for_activations
from qload.testing import assert_sums_exactly
from qload.testing.checks import exact_sums
from tests.gpu.layers import with_offsets
from tests.kernels.cuda_by_hand import Hand
from tests.kernels.cuda_layers import AMPERE, HOPPER, _operators, hand, layer

__all__ = ["_operators", "hand"]  # fixtures
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHIPS = pytest.mark.parametrize("chip", [AMPERE, HOPPER], ids=["8.0", "9.0"])
CASES = {  # bits, group, dtype of scales, whether all zero points are the middle code
    "4 bits": (4, 32, FP16, False),
    "8 bits": (8, 64, FP16, False),
    "groups of 128": (4, 128, BF16, False),
    "a middle zero point": (4, 64, BF16, True),
    "one group": (8, -1, FP16, True),
    "float32": (4, 32, FP32, False),
}
Case = tuple[int, int, torch.dtype, bool]
LAYERS = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def packed(case: Case, N: int = 72) -> StripsWeight:
    bits, group, dtype, centered = case
    return with_offsets(layer(256, N, group, bits, dtype, "strips"), centered, exact=True)


@CHIPS
@LAYERS
@pytest.mark.parametrize("M", [1, 24, 100])
def test_a_layer_is_multiplied(hand: Hand, case: Case, M: int) -> None:
    weight = packed(case)
    is_wide, dtype = case[2] == FP32, FP16 if case[2] == FP32 else case[2]

    assert why_not_on(weight, dtype, hand.capability) is None
    assert_sums_exactly(lambda x: linear(x, weight), weight, dtype, M=M)

    few = M == 1 or (M == 24 and (hand.capability == AMPERE or is_wide))
    assert hand.called[-1] == "decode" if few else hand.called[-1] in ("many", "mma", "decode")
    assert hand.called[-1] != "many" or not is_wide


@pytest.mark.parametrize("chip", [HOPPER])
def test_scales_and_offsets_follow_the_activations(hand: Hand) -> None:
    narrow, wide = (packed(CASES[name]) for name in ("groups of 128", "float32"))
    cast = for_activations(narrow, FP16)

    assert {cast.fields()[name].dtype for name in ("scales", "offsets")} == {FP16}
    assert_sums_exactly(lambda x: linear(x, cast), cast, FP16, M=3)
    assert for_activations(wide, FP16) is wide


@pytest.mark.parametrize("chip", [AMPERE])
@LAYERS
def test_a_layer_is_dequantized_as_it_lies(hand: Hand, case: Case) -> None:
    weight, dtype = packed(case, N=64), FP16 if case[2] == FP32 else case[2]

    assert_sums_exactly(lambda x: large.run(call_of(x, weight)), weight, dtype, M=9)

    assert hand.called == ["dequantize"]


def test_scales_in_float32_leave_registers_for_48_tokens() -> None:
    for tokens in (1, 33, 300, 4096):
        way = mma_gemm.division(tokens, 4096, 4096, 132, wide=True)
        assert way.tokens <= mma_gemm.MAX_WIDE
        assert mma_gemm.fits(way, wide=True)


@pytest.mark.parametrize("chip", [HOPPER])
@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"offset_zero": 16}, "offset_zero"),
        ({"offset_zero": -2}, "offset_zero"),
        ({"zeros": None}, "offset_zero"),
        ({"zeros": torch.zeros(8, 128, dtype=torch.int32)}, "zeros"),
        ({"scales": torch.zeros(8, 128, dtype=BF16)}, "scales"),
    ],
)
def test_operands_that_do_not_fit_are_refused(hand: Hand, change: dict[str, Any], argument: str) -> None:
    weight = packed(CASES["4 bits"], N=128)
    x, _ = exact_sums(weight, FP16, 3)
    call = call_of(x, weight)
    for name, value in change.items():
        object.__setattr__(call, name, value)

    with pytest.raises(ArgumentError, match=argument):
        marlin.check(call)
