"""MLX's modes of floats in the orders of kernels, and back bit for bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from qload.errors import RepackError
from qload.formats import MLXFloatConfig, MLXFloatWeight
from qload.kernel_formats import Fp4StripsWeight, Mxfp8StripsWeight, repack, restore
from qload.testing import assert_same_bits

TYPES: dict[Any, Any] = {"mxfp4": Fp4StripsWeight, "nvfp4": Fp4StripsWeight, "mxfp8": Mxfp8StripsWeight}


def layer(mode: Any, N: int, K: int) -> MLXFloatWeight:
    """Build a layer of random codes; its exponents are within 16 of each other."""
    config, make = MLXFloatConfig(mode), torch.Generator().manual_seed(N)
    codes = torch.randint(256, (N, K * config.bits // 8), generator=make)
    if mode == "mxfp8":
        codes[codes & 0x7F == 0x7F] = 0
    scales = torch.randint(0x70, 0x7F, (N, K // config.group_size), generator=make)
    return MLXFloatWeight(
        config=config, weight=codes.to(torch.uint8).view(torch.uint32), scales=scales.to(torch.uint8)
    )


@pytest.mark.parametrize(("mode", "layout"), [*((mode, "strips") for mode in TYPES), ("nvfp4", "marlin")])
@pytest.mark.parametrize(("N", "K"), [(64, 128), (3, 96)])
def test_floats_have_the_same_values_and_come_back_bit_for_bit(
    mode: Any, layout: str, N: int, K: int
) -> None:
    weight = layer(mode, N, K)

    packed = repack(weight, layout, **({"dtype": torch.float16} if layout == "marlin" else {}))

    assert type(packed) is TYPES[mode] or layout == "marlin"
    assert_same_bits(packed.dequantize(), weight.dequantize())
    restored = restore(packed)
    assert (type(restored), restored.config) == (MLXFloatWeight, weight.config)
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("layout", ["strips", "marlin"])
def test_fused_parts_have_a_second_scale_each(layout: str) -> None:
    stored = layer("nvfp4", 64, 128)
    weight = replace(stored, layer=replace(stored.layer, parts=(40, 24)))

    packed = repack(weight, layout, **({"dtype": torch.float16} if layout == "marlin" else {}))

    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_bits(restore(packed).fields()["scales"], weight.scales)


@pytest.mark.usefixtures("seen_texts")
def test_a_nan_is_named_by_the_tensor_of_mlx() -> None:
    weight = layer("mxfp4", 2, 64)
    weight.scales[1, 0] = 255

    with pytest.raises(
        RepackError, match=r"1 of 4 scales of mlx_float\.scales are NaN: .* output 1 and group 0"
    ):
        repack(weight, "strips")
