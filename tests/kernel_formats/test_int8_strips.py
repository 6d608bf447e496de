"""Int8 in strips: values and bytes of every format bit for bit, and refusals."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.errors import RepackError
from qload.formats import BNBConfig, BNBWeight, CTIntConfig, CTIntWeight, EETQConfig, EETQWeight
from qload.kernel_formats import Int8StripsConfig, Int8StripsWeight, repack, restore
from qload.layouts import eetq, strips
from qload.spec import Layer, Weight
from qload.testing import assert_same_bits


def signed(N: int, K: int, seed: int = 0, least: int = -128) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randint(least, 128, (N, K), generator=make).to(torch.int8)


def bnb(N: int, K: int, seed: int, dtype: torch.dtype) -> Weight:
    make = torch.Generator().manual_seed(seed)
    return BNBWeight(
        config=BNBConfig(), weight=signed(N, K, seed, -127), SCB=torch.rand(N, generator=make) + 0.01
    )


def ct_channel(N: int, K: int, seed: int, dtype: torch.dtype) -> Weight:
    make = torch.Generator().manual_seed(seed)
    scale = (torch.rand(N, 1, generator=make) + 0.01).to(dtype)
    return CTIntWeight(config=CTIntConfig((1, -1)), weight=signed(N, K, seed), weight_scale=scale)


def ct_tensor(N: int, K: int, seed: int, dtype: torch.dtype) -> Weight:
    scale = torch.tensor([0.37]).to(dtype)
    return CTIntWeight(config=CTIntConfig(None), weight=signed(N, K, seed), weight_scale=scale)


def of_eetq(N: int, K: int, seed: int, dtype: torch.dtype) -> Weight:
    make = torch.Generator().manual_seed(seed)
    N, K = -(-N // 64) * 64, -(-K // 64) * 64
    stored = eetq.pack(torch.randint(256, (N, K), generator=make))
    return EETQWeight(
        config=EETQConfig(), weight=stored, weight_scales=(torch.rand(N, generator=make) + 0.01).half()
    )


@given(
    N=st.integers(1, 150),
    K=st.integers(1, 300),
    make=st.sampled_from([bnb, ct_channel, ct_tensor, of_eetq]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1 << 16),
)
def test_values_are_the_same_and_the_checkpoint_comes_back_bit_for_bit(
    N: int, K: int, make: Any, dtype: torch.dtype, seed: int
) -> None:
    weight = make(N, K, seed, dtype)

    packed = repack(weight, "strips")
    restored = restore(packed)

    assert type(packed) is Int8StripsWeight
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert (type(restored), restored.config, restored.layer) == (type(weight), weight.config, weight.layer)
    assert restored.fields().keys() == weight.fields().keys()
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name], tensor)


def test_bytes_are_codes_and_128_and_padding_is_codes_of_zero() -> None:
    weight = bnb(72, 130, 0, torch.float32)

    packed: Any = repack(weight, "strips")

    codes = strips.rows(8).unpack(packed.qweight)
    assert torch.equal(codes[:130, :72].T, weight.fields()["weight"].int() + 128)
    assert bool((codes[130:] == 128).all() and (codes[:, 72:] == 128).all())
    assert packed.config == Int8StripsConfig(1 / 127)
    assert torch.equal(packed.scales[:72], weight.fields()["SCB"] * (1 / 127))
    assert not bool(packed.scales[72:].any())


@pytest.mark.usefixtures("seen_texts")
def test_a_weight_built_by_hand_is_not_restored() -> None:
    packed: Any = repack(bnb(64, 128, 0, torch.float32), "strips")
    by_hand = Int8StripsWeight(config=packed.config, layer=Layer((64,), 128, (64, 128)), **packed.fields())

    with pytest.raises(RepackError, match="built by hand"):
        restore(by_hand)


def ct(config: CTIntConfig, scale: torch.Tensor, **more: Any) -> CTIntWeight:
    return CTIntWeight(config=config, weight=signed(64, 256, least=-8) % 8, weight_scale=scale, **more)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("weight", "text"),
    [
        pytest.param(ct(CTIntConfig((1, -1), bits=4), torch.ones(64, 1)), "8 bits, got 4", id="4 bits"),
        pytest.param(ct(CTIntConfig((1, 128)), torch.ones(64, 2)), "for the tensor or one an", id="groups"),
        pytest.param(
            ct(
                CTIntConfig((1, -1), symmetric=False),
                torch.ones(64, 1),
                weight_zero_point=torch.ones(64, 1, dtype=torch.int8),
            ),
            "no zero points",
            id="zero points",
        ),
    ],
)
def test_what_strips_cannot_represent_is_refused(weight: CTIntWeight, text: str) -> None:
    with pytest.raises(RepackError, match=text):
        repack(weight, "strips")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "zero", [None, torch.tensor([-7], dtype=torch.int8)], ids=["symmetric", "zero point"]
)
def test_stored_scales_of_the_activations_come_back_bit_for_bit(
    zero: torch.Tensor | None, stored: torch.dtype
) -> None:
    scale = torch.tensor([0.0173]).to(stored)
    config = CTIntConfig((1, -1), static=True)
    weight = ct(config, torch.ones(64, 1), input_scale=scale, input_zero_point=zero)

    packed = repack(weight, "strips")
    restored = restore(packed)

    assert_same_bits(packed.fields()["input_scale"], scale)
    assert restored.fields().keys() == weight.fields().keys()
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name], tensor)
