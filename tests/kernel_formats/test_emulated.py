"""Every kernel format against emulators, which know lanes and words but no layout."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.formats import (
    CTMXFP4Weight,
    CTNVFP4Weight,
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    Marlin24Weight,
    MarlinWeight,
    ModelOptNVFP4Weight,
    MXFP4Config,
    NVFP4Config,
)
from qload.kernel_formats import Fp4MarlinWeight, Fp8MarlinWeight, GPTQMarlinWeight, repack
from qload.layouts import STORED_MINUS_ONE, StoredMinusOne, gptq
from qload.spec import Weight
from qload.testing import (
    assert_reads_back,
    assert_sums_exactly,
    assert_within_bound,
    emulators,
    layers,
)
from tests.example_counts import at_most
from tests.format_cases import CONFIGS
from tests.kernel_formats.fp4_layers import GENERATIONS, lanes_read


def emulate(weight: Any) -> torch.Tensor:
    """Emulate the kernel's lanes: (N, K), float32, without padding."""
    N, K = weight.shape
    if isinstance(weight, GPTQMarlinWeight):
        rows = emulators.marlin_weight(
            weight.qweight, weight.scales, bits=weight.config.bits, qzeros=weight.qzeros,
            g_idx=weight.g_idx, perm=weight.perm, is_k_full=weight.config.is_k_full,
        )  # fmt: skip
    elif isinstance(weight, MarlinWeight):
        grouped = weight.config.group_size != -1
        rows = emulators.marlin_weight(weight.B, weight.s, bits=weight.config.bits, grouped=grouped)
    elif isinstance(weight, Marlin24Weight):
        grouped = weight.config.group_size != -1
        rows = emulators.marlin_24_weight(
            weight.B_24, weight.B_meta, weight.s, bits=weight.config.bits, grouped=grouped
        )
    elif isinstance(weight, Fp4MarlinWeight):
        rows = lanes_read(weight)
    elif isinstance(weight, Fp8MarlinWeight):
        rows = emulators.fp8_marlin_weight(
            weight.qweight, weight.scales, exponent_bias=weight.config.exponent_bias
        )
    else:
        rows = emulators.exllama_weight(
            weight.qweight, weight.qzeros, weight.scales, bits=weight.config.bits, g_idx=weight.g_idx,
            q_perm=weight.q_perm, zero_offset=int(isinstance(weight.config.zeros, StoredMinusOne)),
        )  # fmt: skip
    return rows[:K, :N].T.float().contiguous()


GPTQ = st.builds(
    lambda bits, group, zeros: GPTQConfig(bits, group, zeros, positional=group != -1),
    st.sampled_from([4, 8]), st.sampled_from([-1, 32, 64, 128]), st.just(STORED_MINUS_ONE),
)  # fmt: skip
ANY_GPTQ = st.builds(
    lambda bits, group: GPTQConfig(bits, group, positional=group != -1),
    st.sampled_from([2, 3, 4, 8]), st.sampled_from([-1, 16, 32, 96, 192]),
)  # fmt: skip


@st.composite
def fp8_weights(draw: st.DrawFn, *, exact: bool = False) -> Fp8Weight:
    """Draw an e4m3fn weight with one scale, one per output or one per block; small integers if `exact`."""
    N, K = draw(st.sampled_from([64, 72, 192])), draw(st.sampled_from([100, 128, 288]))
    blocks = (-(-N // 128), -(-K // 128))
    shape, block = draw(
        st.sampled_from([((), None), ((1,), None), ((N, 1), None), ((1, N), None), (blocks, (128, 128))])
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    weight = torch.randn(N, K, generator=generator)
    scale = torch.rand(shape, generator=generator) + 0.01
    if exact:
        weight, scale = (torch.arange(N * K) % 17 - 8).reshape(N, K).float(), torch.full(shape, 0.5)
    config = Fp8Config("block", block) if block else Fp8Config()
    return Fp8Weight(
        config=config, weight=weight.to(torch.float8_e4m3fn), weight_scale=scale.reshape(shape or (1,))
    )


@st.composite
def fp4_weights(draw: st.DrawFn, *, exact: bool = False) -> Weight:
    """Draw NVFP4 of either writer, or MXFP4, with few bits in the second scale; one scale if `exact`."""
    N, K = draw(st.sampled_from([64, 72, 192])), draw(st.sampled_from([96, 128, 288]))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    packed = torch.randint(256, (N, K // 2), generator=noise, dtype=torch.uint8)
    if draw(st.booleans()):
        exponents = torch.randint(120, 135, (N, K // 32), generator=noise, dtype=torch.uint8)
        exponents = exponents.fill_(128) if exact else exponents
        return CTMXFP4Weight(config=MXFP4Config(), weight_packed=packed, weight_scale=exponents)
    scales = torch.ones(N, K // 16) if exact else torch.rand(N, K // 16, generator=noise) + 0.1
    stored, second = scales.to(torch.float8_e4m3fn), torch.tensor([2.0])
    if draw(st.booleans()):
        inverse = second.reciprocal()
        return CTNVFP4Weight(
            config=NVFP4Config(), weight_packed=packed, weight_scale=stored, weight_global_scale=inverse
        )
    return ModelOptNVFP4Weight(
        config=NVFP4Config(), weight=packed, weight_scale=stored, weight_scale_2=second
    )


def draw_weight(kind: str, data: Any, *, exact: bool = False) -> Weight:
    """Draw a weight in a kernel's order."""
    if kind == "fp4":
        layout = data.draw(st.sampled_from(GENERATIONS))
        return repack(data.draw(fp4_weights(exact=exact)), layout, dtype=torch.bfloat16)
    if kind == "fp8":
        dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16]))
        weight = data.draw(fp8_weights(exact=exact))
        return repack(weight, "marlin", dtype=dtype, exponent_bias=data.draw(st.booleans()))
    fillings = ("count",) if exact else ("zeros", "count", "noise")
    if kind in ("marlin", "marlin_24"):
        weight_type = MarlinWeight if kind == "marlin" else Marlin24Weight
        return data.draw(layers(weight_type, CONFIGS[weight_type], K=384, most=2, fillings=fillings)).weight()
    configs, K = (GPTQ, 288) if kind == "gptq_marlin" else (ANY_GPTQ, 192)
    weight = data.draw(layers(GPTQWeight, configs, N=96, K=K, fillings=fillings)).weight()
    if kind == "exllama":  # its kernel does not mask: it reads a logical zero point of 0 differently
        packing = gptq.columns(weight.config.bits)
        points = weight.config.zeros.read(weight.qzeros, packing).clamp(1)
        weight.qzeros.copy_(weight.config.zeros.write(points, packing))
    return repack(weight, "marlin" if kind == "gptq_marlin" else "exllama")


KINDS = ["gptq_marlin", "marlin", "marlin_24", "exllama", "fp8", "fp4"]
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@given(data=st.data())
@at_most(40)
def test_emulated_lanes_and_layout_give_equal_weights(kind: str, data: Any) -> None:
    weight = draw_weight(kind, data)
    got, want = emulate(weight), weight.dequantize()

    assert torch.equal(got.nan_to_num(7e7), want.nan_to_num(7e7))


@every_kind
@given(data=st.data(), dtype=st.sampled_from([torch.float16, torch.bfloat16]), M=st.sampled_from([1, 3]))
@at_most(15)
def test_emulated_lanes_and_linear_multiply_alike(kind: str, data: Any, dtype: torch.dtype, M: int) -> None:
    weight, exact = draw_weight(kind, data), draw_weight(kind, data, exact=True)
    x = torch.randn(M, weight.layer.K, generator=torch.Generator().manual_seed(M)).to(dtype)
    for make_linear in (lambda w: lambda x: emulators.multiply(x, emulate(w).T), lambda w: w.get_linear()):
        if not weight.dequantize().isnan().any():
            assert_reads_back(make_linear(weight), weight, dtype)
            assert_within_bound(make_linear(weight), weight, x)
        assert_sums_exactly(make_linear(exact), exact, dtype)
