"""Shares of four-bit floats in Marlin's order."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.formats import CTMXFP4Weight, NVFP4Config
from qload.kernel_formats import Fp4MarlinWeight, restore
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld
from qload.repacking import RepackingLoader
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.example_counts import at_most
from tests.kernel_formats.fp4_layers import BRAIN, KINDS, NVFP4, mxfp4, nvfp4, pack


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("split", ["col", "row"])
@pytest.mark.parametrize("kind", [*KINDS, CTMXFP4Weight], ids=lambda kind: kind.format)
@given(data=st.data())
@at_most(5)
def test_a_share_of_the_repack_is_the_repack_of_the_share(
    kind: Any, split: str, world: int, data: Any
) -> None:
    """Shares without padding; scales are cut between pairs of groups."""
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    N, K = 64 * world, 128 * world
    codes = torch.randint(16, (N, K), generator=noise)
    if kind is CTMXFP4Weight:
        weight: Any = mxfp4(torch.randint(100, 140, (N, K // 32), generator=noise), codes)
    else:
        scales = torch.rand(N, K // 16, generator=noise) + 2.0 ** -data.draw(st.sampled_from([0, 9]))
        weight = nvfp4(scales, codes, kind=kind)
    whole, shares = pack(weight), loaded(weight, split, world)

    for rank, share in enumerate(shares):
        words, scales = whole.qweight, whole.scales.view(torch.uint8)
        G = scales.shape[0]
        pairs, share_bytes = scales.reshape(G // 2, 2 * N), share.scales.view(torch.uint8)
        axis = 1 if split == "col" else 0
        assert_same_bits(share.qweight, words.chunk(world, axis)[rank].contiguous())
        assert_same_bits(share_bytes, pairs.chunk(world, axis)[rank].contiguous().reshape(share_bytes.shape))
        assert share.config == whole.config
        if whole.global_scale is not None:
            assert_same_bits(share.global_scale, whole.global_scale)
        assert_same_bits(share.dequantize(), weight.dequantize().chunk(world, 1 - axis)[rank].contiguous())
        mine = restore(share)
        assert type(mine) is kind
        assert_same_bits(mine.dequantize(), share.dequantize())


def loaded(weight: Weight, split: str, world: int, dtype: torch.dtype = BRAIN) -> list[Any]:
    """Load and repack the share of each rank."""
    inner = FormatLoader(ConfiguredFormat(type(weight), weight.config))
    loader = RepackingLoader(inner, "marlin", dtype=dtype)
    storage = MemoryStorage({f"a.{name}": tensor for name, tensor in weight.fields().items()})
    ranks = [Weights(storage, loader=loader, process_group=rank) for rank in FakeWorld(world)]
    return [getattr(each, f"get_weights_{split}")("a") for each in ranks]


@pytest.mark.parametrize("split", ["col", "row"])
def test_a_small_scale_on_one_rank_raises_scales_on_all(split: str) -> None:
    scales = torch.ones(128, 16)
    scales[0, 0] = 2.0**-8

    shares = loaded(nvfp4(scales), split, 2)

    assert [float(share.global_scale) for share in shares] == [0.5 * 2.0 ** (119 - 2)] * 2


@NVFP4
@pytest.mark.parametrize("second", [0.5, 0.75])
def test_layers_fused_while_they_are_loaded_need_one_second_scale(kind: Any, second: float) -> None:
    parts = [nvfp4(torch.ones(64, 8), kind=kind), nvfp4(torch.ones(64, 8), second=second, kind=kind)]
    tensors = {f"{i}.{name}": t for i, part in enumerate(parts) for name, t in part.fields().items()}
    inner = FormatLoader(ConfiguredFormat(kind, NVFP4Config()))
    loader = RepackingLoader(inner, "marlin", strict=False, dtype=BRAIN)

    got = Weights(MemoryStorage(tensors), loader=loader).get_multi_weights_col(["0", "1"])

    assert type(got) is (Fp4MarlinWeight if second == 0.5 else kind)
    assert_same_bits(got.dequantize(), torch.cat([part.dequantize() for part in parts]))
