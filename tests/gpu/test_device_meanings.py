"""What weights on a device mean: in native code the same bits as in plain torch, for every scale there is."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qload import native
from qload.devices import StoredTable
from qload.devices.cuda_stored import dequantize_stored
from qload.formats import AWQConfig, AWQWeight, CTPackConfig, CTPackWeight
from qload.kernel_formats import repack, restore
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from tests.format_cases import CONFIGS, every_format
from tests.gpu.device_tensors import DTYPES, GUARD, act_order, both, codes_of, guarded, words

pytestmark = pytest.mark.gpu
few = settings(max_examples=12)


@every_format
@DTYPES
@given(data=st.data())
@few
def test_a_weight_means_the_same_in_a_buffer_too(
    weight_type: type[Weight], dtype: torch.dtype, data: Any
) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type])).weight().to("cuda")
    out, memory = guarded(weight.shape, dtype)

    want = both(lambda: weight.dequantize(dtype))
    weight.dequantize(out=out)

    assert_same_bits(out, want)
    assert bool((memory[:GUARD] == 77).all() and (memory[-GUARD:] == 77).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("K", "N"), [(128, 64), (256, 192), (1024, 1088)])
@DTYPES
def test_act_order(bits: int, K: int, N: int, dtype: torch.dtype) -> None:
    weight = act_order(bits, K, N, 64)
    both(lambda: weight.dequantize(dtype))

    for layout in ("exllama", "gptq_v2") if bits == 2 else ("marlin", "exllama", "gptq_v2"):
        if (layout, bits) == ("exllama", 8):
            continue
        packed = repack(weight, layout)
        with native.reference():
            want = repack(weight, layout).fields()
        for name, tensor in packed.fields().items():
            assert_same_bits(tensor, want[name])
        assert_same_bits(both(lambda held=packed: held.dequantize(dtype)), weight.dequantize(dtype))  # type: ignore[misc]
        assert_same_bits(restore(packed).fields()["qweight"], weight.qweight)


@pytest.mark.parametrize("seed", range(3))
@DTYPES
def test_every_fp16_scale_there_is(seed: int, dtype: torch.dtype) -> None:
    K, N = 128, 1 << 16
    scales = torch.arange(N, dtype=torch.int32).to(torch.int16).view(torch.float16)[None]
    stored = {"qweight": words(K, N // 8, seed=seed), "qzeros": words(1, N // 8, seed=seed + 9)}
    weight = AWQWeight(config=AWQConfig(K), scales=scales, **stored).to("cuda")
    assert_same_numbers(weight, dtype)
    assert_same_numbers(repack(weight, "gptq_v2"), dtype)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
@DTYPES
def test_every_symmetric_scale_there_is(bits: int, stored: torch.dtype, dtype: torch.dtype) -> None:
    K, N = 256, 1 << 16
    scales = torch.arange(N, dtype=torch.int32).to(torch.int16).view(stored)[:, None].contiguous()
    config = CTPackConfig(bits, K)
    weight = CTPackWeight(config=config, weight_packed=words(N, K * bits // 32), weight_scale=scales)
    assert_same_numbers(weight.to("cuda"), dtype)


def assert_same_numbers(weight: Weight, dtype: torch.dtype) -> None:
    """The same bits; which NaN a NaN is rounded to is left open."""
    with native.reference():
        want = weight.dequantize(dtype)
    got = weight.dequantize(dtype)
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert_same_bits(got.masked_fill(nan, 0), want.masked_fill(nan, 0))


@pytest.mark.parametrize("blocksize", [64, 256])
@pytest.mark.parametrize("shape", [(1, 2), (33, 65), (64, 256), (1, 4098), (255, 129)], ids=str)
@DTYPES
def test_a_table_of_any_shape(blocksize: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    N, K = shape
    codes = codes_of(8, 1, -(-N * K // 2)).to(torch.uint8)[0]
    scales, table = torch.randn(-(-N * K // blocksize)).cuda(), torch.randn(16).cuda()
    each = torch.stack([codes >> 4, codes & 15], 1).flatten()[: N * K].long()
    place = torch.arange(N * K, device="cuda") // blocksize

    got = torch.empty(N, K, dtype=dtype, device="cuda")
    assert dequantize_stored(StoredTable(codes, table, scales, blocksize), got)

    assert_same_bits(got, (table[each] * scales[place]).reshape(N, K).to(dtype))
