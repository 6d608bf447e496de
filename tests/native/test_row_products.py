"""Products with codes that lie in rows, of every format that has some, by every instruction set here."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qload import native
from qload.formats import (
    CTMXFP4Weight,
    CTNVFP4Weight,
    Fp8Config,
    Fp8Weight,
    ModelOptNVFP4Weight,
    MXFP4Config,
    NVFP4Config,
)
from qload.kernels import cpu
from qload.kernels.cpu import ROW_TYPES, rows_of
from qload.spec import Weight
from qload.testing import assert_reads_back, assert_same_bits, assert_same_twice, assert_within_bound, layers
from tests.format_cases import CONFIGS
from tests.native.memory import ISAS, placed
from tests.native.test_few_rows import PAIRED


def mxfp4(N: int, K: int) -> Weight:
    make = torch.Generator().manual_seed(N + K)
    return CTMXFP4Weight(
        config=MXFP4Config(),
        weight_packed=torch.randint(0, 256, (N, K // 2), generator=make, dtype=torch.uint8),
        weight_scale=torch.randint(120, 126, (N, K // 32), generator=make, dtype=torch.uint8),
    )


def fp8(N: int, K: int) -> Weight:
    numbers = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K))
    scales = torch.arange(N).float()[:, None] / 64 + 1
    return Fp8Weight(config=Fp8Config("channel"), weight=numbers.to(torch.float8_e4m3fn), weight_scale=scales)


LARGE = pytest.mark.parametrize("weight", [mxfp4(40, 1088), fp8(21, 1030)], ids=["mxfp4", "fp8"])


def kernel(weight: Weight, isa: str, threads: int = 1) -> Any:
    def multiply(x: Tensor) -> Tensor:
        with native.using(isa, threads):
            y = cpu.multiply(x, weight)
        assert y is not None
        return y

    return multiply


@ISAS
@pytest.mark.parametrize("weight_type", ROW_TYPES, ids=lambda weight_type: weight_type.format)
@given(data=st.data())
@settings(max_examples=5)
def test_rows_of_every_format_are_read_back(isa: str, weight_type: type[Weight], data: Any) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], most=2)).weight()
    if rows_of(weight) is None:
        assert weight.format in ("ct_pack", "ct_pack_tensor", "modelopt_awq")  # of which some lie otherwise
        return
    multiply, x = (
        kernel(weight, isa),
        torch.randn(4, weight.layer.K, generator=torch.Generator().manual_seed(1)),
    )

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert_reads_back(multiply, weight, dtype)
    assert_within_bound(multiply, weight, x)


@ISAS
@LARGE
def test_rows_longer_than_what_is_spelled_out_at_once(isa: str, weight: Weight) -> None:
    K = weight.shape[1]
    for M in (1, 2, 3, 4, 7):
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(M))
        assert_within_bound(kernel(weight, isa), weight, x)
        assert_same_twice(kernel(weight, isa), x)


@ISAS
@LARGE
def test_threads_and_strides_change_no_bit(isa: str, weight: Weight) -> None:
    K = weight.shape[1]
    wide = torch.randn(24, 2 * K + 1, generator=torch.Generator().manual_seed(0))
    for x in (wide[:, 1 : K + 1], wide[:, : 2 * K : 2], wide[:1, :K].expand(9, K)):
        alone = kernel(weight, isa)(x.contiguous())
        for threads in (1, 2, 3, 8):
            assert_same_bits(kernel(weight, isa, threads)(x), alone)


@ISAS
@LARGE
def test_more_tokens_than_lie_ready_at_once_and_one_that_is_not_finite(isa: str, weight: Weight) -> None:
    x = torch.randn(258, weight.shape[1], generator=torch.Generator().manual_seed(0))
    want = kernel(weight, isa)(x)
    x[256, 3] = torch.nan

    y = kernel(weight, isa)(x)

    assert y[256].isnan().all()
    assert_same_bits(torch.cat([y[:256], y[257:]]), torch.cat([want[:256], want[257:]]))
    assert_within_bound(lambda x: want[:3], weight, x[:3])


def nvfp4(weight_type: Any, second: str, scales: Tensor) -> Any:
    make = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (4, 512), generator=make, dtype=torch.uint8)
    codes = "weight_packed" if weight_type is CTNVFP4Weight else "weight"
    fields = {codes: packed, "weight_scale": scales.view(torch.float8_e4m3fn), second: torch.tensor([0.3])}
    return weight_type(config=NVFP4Config(), **fields)


BYTES = torch.arange(256, dtype=torch.uint8).view(4, 64)
BYTE_SCALES: dict[str, Any] = {
    "exponents": CTMXFP4Weight(
        config=MXFP4Config(),
        weight_packed=torch.full((4, 1024), 0x25, dtype=torch.uint8),
        weight_scale=BYTES,
    ),
    "divided": nvfp4(CTNVFP4Weight, "weight_global_scale", BYTES),
    "multiplied": nvfp4(ModelOptNVFP4Weight, "weight_scale_2", BYTES),
}


@ISAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight", BYTE_SCALES.values(), ids=BYTE_SCALES)
def test_scales_of_every_byte_are_read_as_they_are_stored(isa: str, dtype: torch.dtype, weight: Any) -> None:
    rows, want = rows_of(weight), weight.dequantize()
    assert rows is not None
    assert rows.meaning.scales.data_ptr() == weight.weight_scale.data_ptr()
    normal = want.abs() >= torch.finfo(torch.float32).smallest_normal
    for size in (1, 8, 17):
        x = torch.eye(want.shape[1], dtype=dtype)[::31]
        y = torch.cat([kernel(weight, isa)(some) for some in torch.split(x, size)])
        finite = ~want.isnan().any(1)
        rounded = isa in PAIRED and dtype == torch.bfloat16 and size > 16
        held = want.where(normal | want.isnan(), 0.0) if rounded else want  # as pairs have no smaller ones
        last = len(x) // size * size if rounded else len(x)  # from which on there are fewer tokens
        assert_same_bits(y[:last, finite], (held[finite, ::31].T[:last] + 0.0).to(dtype))
        assert y[:, ~finite].isnan().all()


def of_byte_scales(weight_type: Any, N: int, K: int, second: float) -> Any:
    """Random codes and scales, whose rows end anywhere."""
    make = torch.Generator().manual_seed(K)
    packed = torch.randint(0, 256, (N, K // 2), generator=make, dtype=torch.uint8)
    if weight_type is CTMXFP4Weight:
        scales = torch.randint(120, 126, (N, K // 32), generator=make, dtype=torch.uint8)
        return CTMXFP4Weight(MXFP4Config(), packed, placed(scales, 1))
    scales = placed(torch.randn(N, K // 16, generator=make).to(torch.float8_e4m3fn).view(torch.uint8), 1)
    return weight_type(NVFP4Config(), packed, scales.view(torch.float8_e4m3fn), torch.tensor([second]))


@ISAS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_type", [CTMXFP4Weight, CTNVFP4Weight, ModelOptNVFP4Weight])
def test_rows_whose_scales_are_bytes_end_anywhere(isa: str, dtype: torch.dtype, weight_type: Any) -> None:
    for K, second in ((32, 1.0), (160, 48.0), (480, 0.1), (544, 1e-30), (1216, 1e30), (8256, 3.0)):
        weight = of_byte_scales(weight_type, 18, K, second)
        multiply, some = kernel(weight, isa), torch.arange(0, K, K // 32)
        want = weight.dequantize().T[some].to(dtype) + 0.0
        for size in (1, 2, 3, 4, 8):
            read = torch.cat([multiply(x) for x in torch.split(torch.eye(K, dtype=dtype)[some], size)])
            assert_same_bits(read + 0.0, want)
        for M in (1, 3, 5, 9, 16):
            x = (torch.randn(M, K, generator=torch.Generator().manual_seed(M)) / 64).to(dtype)
            if want.isfinite().all():
                assert_within_bound(multiply, weight, x)


def test_several_second_scales_become_those_of_each_row() -> None:
    whole: Any = BYTE_SCALES["divided"]
    layer = replace(whole.layer, parts=(1, 3))
    weight = replace(whole, weight_global_scale=torch.tensor([0.3, 0.7]), layer=layer)

    assert rows_of(weight).meaning.scales.dtype == torch.float32  # type: ignore[union-attr]


def test_a_weight_whose_bytes_are_a_view_is_read_where_it_lies() -> None:
    weight: Any = mxfp4(8, 64)
    wide = torch.zeros(8, 40, dtype=torch.uint8)
    wide[:, 4:36] = weight.weight_packed
    moved = weight.holding({"weight_packed": wide[:, 4:36]})

    assert rows_of(moved).bytes.data_ptr() == wide.data_ptr() + 4  # type: ignore[union-attr]
    assert_same_bits(kernel(moved, native.isa())(torch.eye(64)), kernel(weight, native.isa())(torch.eye(64)))
