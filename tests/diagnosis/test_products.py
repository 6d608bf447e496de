"""Faults of products and of shares: each is planted without the code of the diagnosis, and is named."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qload import Weight
from qload.diagnosis import diagnose
from qload.diagnosis.product_faults import diagnose_tokens
from qload.layouts import marlin, swizzle
from qload.testing import checks
from qload.testing.layer_factory import layer_of
from qload.testing.traits import Traits

N, K, M = 128, 256, 33
GPTQ: Weight = layer_of(Traits("gptq", 4, 64, False, False, "v1"), N, K, filling="noise").weight()
NVFP4: Weight = layer_of(Traits("modelopt_nvfp4", 4, 16), N, K, filling="noise").weight()
X = torch.randn(M, K, generator=torch.Generator().manual_seed(1)).half()
Kernel = Callable[[Tensor], Tensor]


def plain(x: Tensor) -> Tensor:
    return (x.float() @ GPTQ.dequantize().half().float().T).half()


def with_inputs(change: Callable[[Tensor], Tensor]) -> Kernel:
    return lambda x: (change(x.float()) @ GPTQ.dequantize().float().T).half()


def int8(x: Tensor) -> Tensor:
    scale = x.abs().max(1, keepdim=True)[0] / 127
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


def uint8(x: Tensor) -> Tensor:
    low, high = x.min(1, keepdim=True)[0], x.max(1, keepdim=True)[0]
    scale = (high - low) / 255
    zero = torch.round(-low / scale)
    return (torch.clamp(torch.round(x / scale) + zero, 0, 255) - zero) * scale


def fp8(x: Tensor) -> Tensor:
    scale = x.abs().max(1, keepdim=True)[0] / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


ROUNDINGS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "int8": ("inputs-int8", int8, "inputs rounded to int8, with a scale for each token"),
    "uint8": ("inputs-int8", uint8, "inputs rounded to uint8, with a zero point for each token"),
    "fp8": ("inputs-fp8", fp8, "inputs rounded to e4m3, with a scale for each token"),
    "cast": (
        "inputs-fp8",
        lambda x: x.to(torch.float8_e4m3fn).float(),
        "inputs rounded to e4m3, without a scale",
    ),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounded_inputs_are_named(name: str) -> None:
    fault, change, words = ROUNDINGS[name]

    with pytest.raises(checks.WrongProduct) as caught:
        checks.assert_within_bound(with_inputs(change), GPTQ, X)

    assert (caught.value.diagnosis.fault, caught.value.diagnosis.share) == (fault, 1.0)
    assert f"\n  cause     {words}: explains 100 % of " in str(caught.value)


def test_rounded_inputs_are_named_by_exact_sums_of_a_narrow_type() -> None:
    coded = layer_of(Traits("gptq", 4, 64, False, False, "v1"), N, K).weight()

    def kernel(x: Tensor) -> Tensor:
        return (uint8(x.float()) @ coded.dequantize().T).to(torch.bfloat16)

    with pytest.raises(checks.WrongProduct, match="explains 100 %") as caught:
        checks.assert_sums_exactly(kernel, coded, torch.bfloat16)

    assert caught.value.diagnosis.fault == "inputs-int8"


@pytest.mark.parametrize(
    "change",
    [lambda x: x, lambda x: x.to(torch.bfloat16).float(), lambda x: x + 0.01, lambda x: int8(x) + 0.05],
)
def test_other_inputs_are_not_called_rounded(change: Callable[[Tensor], Tensor]) -> None:
    with suppress(AssertionError):
        checks.assert_within_bound(with_inputs(change), GPTQ, X)
        return
    with pytest.raises(AssertionError) as caught:
        checks.assert_within_bound(with_inputs(change), GPTQ, X)

    assert type(caught.value) is AssertionError, str(caught.value)


def beyond(tokens: int, value: float) -> Kernel:
    def kernel(x: Tensor) -> Tensor:
        y = plain(x)
        y[tokens:] = value
        return y

    return kernel


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_rows_of_x_beyond_a_tile_are_named_by_every_check(value: float) -> None:
    coded = layer_of(Traits("gptq", 4, 64, False, False, "v1"), N, K).weight()
    x, want = checks.exact_sums(coded, torch.float16, M)
    exact = torch.cat([want[:16], torch.full_like(want[16:], value)])
    for check in (
        lambda: checks.assert_within_bound(beyond(16, value), GPTQ, X),
        lambda: checks.assert_are_sums(lambda _: exact, x, want, coded),
    ):
        with pytest.raises(checks.WrongProduct, match="rows 16 to 32 of x are wrong, those of"):
            check()
    with pytest.raises(checks.Misread, match="rows 16 to 255 of x are wrong") as caught:
        checks.assert_reads_back(beyond(16, value), GPTQ, torch.float16)

    assert caught.value.diagnosis.fault == "tokens"


def test_inputs_left_out_are_no_rows_of_x() -> None:
    def kernel(x: Tensor) -> Tensor:
        return plain(x * (torch.arange(K) < 16))

    with pytest.raises(checks.Misread) as caught:
        checks.assert_reads_back(kernel, GPTQ, torch.float16)

    assert caught.value.diagnosis.fault == "left-out"


def test_rows_are_named_only_behind_right_ones() -> None:
    wrong = torch.zeros(20, 100, dtype=torch.bool)
    wrong[10:, 3] = True

    assert diagnose_tokens(wrong) is not None
    assert diagnose_tokens(wrong | (torch.arange(20) == 0)[:, None]) is None
    assert diagnose_tokens(wrong[:15]) is None
    wrong[12:15] = False
    assert diagnose_tokens(wrong) is None


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_missing_share_of_a_rank_is_named(axis: int, rank: int) -> None:
    expected = GPTQ.dequantize() + 1e-3
    got = expected.clone()
    got.chunk(4, axis)[rank].zero_()

    found = diagnose(expected, got, world=4)

    assert found.fault == "rank-missing"
    assert found.sentence.startswith(f"zeros in the place of rank {rank}'s share")
    assert diagnose(expected, got).fault == "left-out"


def test_a_matrix_with_its_axes_exchanged_is_named() -> None:
    meant = GPTQ.dequantize()

    assert diagnose(meant, meant.T.reshape(N, K), GPTQ).fault == "transposed"
    assert diagnose(meant, meant.reshape(K, N).T, GPTQ).fault == "transposed"


def test_swizzled_scales_are_named() -> None:
    swizzled = swizzle.swizzle_scales(NVFP4.weight_scale).reshape(N, -1)
    got = replace(NVFP4, weight_scale=swizzled).dequantize()

    found = diagnose(NVFP4.dequantize(), got, NVFP4)

    assert (found.fault, found.share) == ("scale-order", 1.0)
    assert found.sentence.startswith("scales in the order of 128 x 4 blocks (swizzled)")
    assert diagnose(got, NVFP4.dequantize(), replace(NVFP4, weight_scale=swizzled)).fault == "scale-order"


def test_the_order_of_marlins_other_scales_is_named() -> None:
    grouped = marlin.SCALES_GROUPED.apply(GPTQ.scales.contiguous())
    got = replace(GPTQ, scales=marlin.SCALES_PER_COLUMN.apply(grouped)).dequantize()

    found = diagnose(GPTQ.dequantize(), got, GPTQ)

    assert found.fault == "scale-order"
    assert "read as those of" in found.sentence


def test_gate_and_up_of_a_stack_are_named() -> None:
    experts = torch.stack([GPTQ.dequantize(), GPTQ.dequantize().flip(0) * 1.5])

    found = diagnose(experts, torch.cat([experts[:, N // 2 :], experts[:, : N // 2]], 1))

    assert found.fault == "parts-exchanged"
    assert "gate and up are exchanged" in found.sentence
