"""Codes in bytes and down columns: the same bits as in plain torch, at borders and odd addresses too."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.devices import StoredRows
from qload.devices.cuda_stored import dequantize_stored
from qload.formats import BNBConfig, BNBWeight, CTIntConfig, CTIntWeight, Fp8Config, Fp8Weight
from qload.kernels import products
from qload.spec import Weight
from qload.testing import assert_same_bits
from tests.bench import cell_layers
from tests.bench.cell_layers import LAYERS
from tests.gpu.device_tensors import DTYPES, GUARD, both, guarded, placed

pytestmark = pytest.mark.gpu
SHAPES = [(128, 128), (64, 8192), (192, 2048), (1024, 384)]
LOOKED = ("fp8", "mxfp", "nvfp4", "ct int8", "bnb", "eetq", "modelopt", "2:4", "exl2", "gptq 3")


def assert_same_numbers(got: Tensor, want: Tensor) -> None:
    """The same bits; which NaN a NaN is rounded to is left open."""
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert_same_bits(got.masked_fill(nan, 0), want.masked_fill(nan, 0))


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith(LOOKED)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@DTYPES
def test_layers_of_bytes_and_streams(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = LAYERS[name](*shape)
    with native.reference():
        want = weight.dequantize(dtype)
    out, memory = guarded(shape, dtype)

    weight.dequantize(out=out)

    assert_same_numbers(out, want)
    assert bool((memory[:GUARD] == 77).all() and (memory[-GUARD:] == 77).all())


def stored(weight: Weight) -> Any:
    found = weight.stored()
    assert found is not None
    return found


@pytest.mark.parametrize(
    "name", ["fp8 block", "mxfp8", "mxfp4", "modelopt awq", "2:4", "exl2", "gptq 3", "eetq"]
)
def test_the_module_reads_them_as_they_lie(name: str) -> None:
    weight = LAYERS[name](256, 256)

    assert dequantize_stored(stored(weight), torch.empty(256, 256, dtype=torch.float16, device="cuda"))


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("divide", [False, True])
@DTYPES
def test_every_byte_and_many_scales(code: torch.dtype, divide: bool, dtype: torch.dtype) -> None:
    codes = torch.arange(256, device="cuda").to(torch.uint8).repeat(64, 1).view(code)
    scales = torch.randn(64, 1, device="cuda").exp() * 10.0 ** torch.arange(-32, 32, device="cuda")[:, None]
    scales[:4, 0] = torch.tensor([0.0, -1.0, torch.inf, torch.nan])
    weight = Fp8Weight(config=Fp8Config("channel", divide=divide), weight=codes, weight_scale=scales)

    with native.reference():
        want = weight.dequantize(dtype)
    assert_same_numbers(weight.dequantize(dtype), want)


@pytest.mark.parametrize("block", [(1, 8), (2, 16), (3, 24), (128, 128), (64, 5), (1, 12), (300, 7)], ids=str)
@DTYPES
def test_blocks_of_any_size(block: tuple[int, int], dtype: torch.dtype) -> None:
    weight = cell_layers.fp8(*block, block=block)(200, 328)

    both(lambda: weight.dequantize(dtype))


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("K", [8, 63, 256, 264, 1000])
@DTYPES
def test_odd_addresses_and_sizes_go_another_way(offset: int, K: int, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(K)
    codes = torch.randint(-127, 128, (37, K), generator=noise, dtype=torch.int8).cuda()
    weight = BNBWeight(config=BNBConfig(), weight=placed(codes, offset), SCB=torch.rand(37).cuda())
    want = both(lambda: weight.dequantize(dtype))

    out = placed(torch.zeros_like(want), offset)
    assert_same_bits(weight.dequantize(out=out), want)


@pytest.mark.parametrize("block", [(1, -1), (1, 32), (16, 64)], ids=str)
@DTYPES
def test_int8_with_zero_points(block: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = 48 // block[0], 1 if block[1] == -1 else 192 // block[1]
    noise = torch.Generator().manual_seed(1)
    weight = CTIntWeight(
        config=CTIntConfig(block, symmetric=False),
        weight=torch.randint(-128, 128, (48, 192), generator=noise, dtype=torch.int8),
        weight_scale=torch.randn(rows, columns, generator=noise).bfloat16(),
        weight_zero_point=torch.randint(-128, 128, (rows, columns), generator=noise, dtype=torch.int8),
    ).to("cuda")

    both(lambda: weight.dequantize(dtype))


@pytest.mark.parametrize("exponent", range(0, 256, 51))
def test_every_kind_of_exponent(exponent: int) -> None:
    weight = LAYERS["mxfp8"](64, 256)
    scales = torch.full_like(weight.fields()["weight_scale"], exponent)
    changed = replace(weight, weight_scale=scales)  # type: ignore[type-var]
    with native.reference():
        want = changed.dequantize()

    assert_same_numbers(changed.dequantize(), want)


@pytest.mark.parametrize("name", ["fp8 block", "fp8 channel", "modelopt awq", "mxfp4", "ct int8 group"])
def test_some_outputs_alone(name: str) -> None:
    weight = LAYERS[name](512, 256)
    want = weight.dequantize(torch.float16)
    for start, rows in ((0, 128), (128, 256), (256, 256)):
        got = torch.empty(rows, 256, dtype=torch.float16, device="cuda")
        assert dequantize_stored(stored(weight), got, start)
        assert_same_bits(got, want[start : start + rows])
    assert not dequantize_stored(stored(LAYERS["fp8 block"](512, 256)), got, 64)


@DTYPES
def test_inputs_with_factors_are_multiplied_before_the_rounding(dtype: torch.dtype) -> None:
    weight = LAYERS["modelopt awq"](512, 256)
    factors = weight.input_factors
    assert factors is not None
    assert isinstance(stored(weight), StoredRows)
    want = (weight.dequantize() * factors.float()).to(dtype)

    got = torch.cat(
        [w.clone() for _, w in products.weight_slices(weight, dtype, factors, 100 * 256 * dtype.itemsize)]
    )

    assert_same_bits(got, want)


def test_a_graph_replays_what_streams_mean() -> None:
    weight = LAYERS["exl2"](256, 512)
    want = weight.dequantize(torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = weight.dequantize(torch.bfloat16)
    graph.replay()

    assert_same_bits(got, want)
