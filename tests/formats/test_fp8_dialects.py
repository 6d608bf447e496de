"""FP8 as ModelOpt stores blocks, and scales that transformers stores beside weights that stayed plain."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import CutError, MissingTensorError, ShapeError
from qload.experts import with_experts
from qload.formats import Fp8Config
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.verify import verify
from qload.weights import Weights
from tests.formats.fp8_layers import codes, layer, weights

pytestmark = pytest.mark.usefixtures("seen_texts")

MODELOPT = Fp8Config("block", (128, 128), axes="P")


def spread(N: int, K: int) -> tuple[dict[str, Tensor], Tensor]:
    """A layer of blocks as ModelOpt stores it, and what it means."""
    scale = 2.0 ** (torch.arange(-(-N // 128) * -(-K // 128)).reshape(-(-N // 128), -1) % 7)
    stored = codes(N, K)
    meant = stored.float() * scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    return layer("a", stored, scale[:, None, :, None]), meant


@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_of_modelopt_are_cut_as_others_are(dim: int) -> None:
    tensors, meant = spread(512, 256) if dim == 0 else spread(200, 512)
    load = Weights.get_weights_row if dim else Weights.get_weights_col

    for world in (1, 2, 4):
        parts = [load(weights(tensors, MODELOPT, rank), "a") for rank in FakeWorld(world)]
        assert_same_bits(torch.cat([part.dequantize() for part in parts], dim), meant)
        assert {part.fields()["weight_scale"].ndim for part in parts} == {4}


def test_blocks_of_modelopt_are_fused_and_a_cut_inside_of_one_is_refused() -> None:
    tensors, meant = spread(256, 130)
    again = {name.replace("a.", "b."): tensor for name, tensor in tensors.items()}

    fused = weights(tensors | again, MODELOPT).get_multi_weights_col(["a", "b"])
    assert_same_bits(fused.dequantize(), torch.cat([meant, meant]))
    with pytest.raises(CutError, match="cuts must be multiples of 128 "):
        weights(tensors, MODELOPT, Rank(0, 4)).get_weights_col("a")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("world", [1, 2])
def test_scales_of_blocks_may_be_exponents(dtype: torch.dtype, world: int) -> None:
    exponents = torch.tensor([[120, 127], [128, 131]], dtype=torch.uint8)
    tensors = layer("a", codes(256, 256), exponents.view(dtype))
    factors = torch.exp2(exponents.float() - 127).repeat_interleave(128, 0).repeat_interleave(128, 1)

    ranks = [weights(tensors, Fp8Config("block", (128, 128)), rank) for rank in FakeWorld(world)]

    shares = [rank.get_weights_row("a").dequantize() for rank in ranks]
    assert_same_bits(torch.cat(shares, 1), codes(256, 256).float() * factors)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_lone_block_has_one_scale_for_the_tensor(shape: tuple[int, ...]) -> None:
    tensors = layer("a", codes(64, 128), torch.full(shape, 0.5))

    for rank in FakeWorld(4):
        share = weights(tensors, MODELOPT, rank).get_weights_col("a")
        assert share.config.per == "tensor"
        assert_same_bits(share.dequantize(), codes(64, 128).chunk(4)[rank.rank()].float() * 0.5)


@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 2, 1), (1, 1, 2, 2), (2,)])
def test_scales_that_do_not_fit_the_blocks_of_modelopt_are_refused(shape: tuple[int, ...]) -> None:
    tensors = layer("a", codes(128, 256), torch.ones(shape))

    with pytest.raises(ShapeError, match=r"a\.weight_scale: wrong shape\n  expected \(1, 2\)"):
        weights(tensors, MODELOPT).get_weights("a")


@pytest.mark.parametrize("scale", [torch.full((1, 1), torch.nan), torch.tensor(0.0), torch.ones(3)])
def test_a_scale_beside_a_weight_that_stayed_plain_is_not_applied(scale: Tensor) -> None:
    """transformers stores one that it never filled where blocks do not divide a weight."""
    plain = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = layer("a", plain, scale, "weight_scale_inv") | layer(
        "b", codes(4, 6), torch.ones(1, 1), "weight_scale_inv"
    )
    loader = loader_from_config({"quant_method": "fp8", "weight_block_size": [128, 128]})

    read = Weights(MemoryStorage(tensors), loader=loader)
    assert torch.equal(read.get_weights_col("a").dequantize(), plain.float())
    assert read.get_weights("b").format == "fp8"
    assert read.report().complete
    assert read.report().notes == ("a: weight_scale_inv lies beside a plain weight and is not applied",)


@pytest.mark.parametrize("value", [torch.nan, -1.0, 0.0])
def test_nobody_judges_a_scale_that_means_nothing(value: float, tmp_path: Path) -> None:
    beside = torch.full((1, 1), value)
    tensors = layer("model.layers.0.k_proj", torch.randn(4, 8).bfloat16(), beside, "weight_scale_inv")
    tensors |= layer("model.layers.0.q_proj", codes(8, 8), torch.ones(1, 1), "weight_scale_inv")
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    save_file(tensors, tmp_path / "model.safetensors")

    report = verify(tmp_path)
    assert (report.verdict, report.findings) == ("ok", ())
    assert [(layer.format, layer.bytes) for layer in report.layers] == [("unquantized", 68), ("fp8", 68)]


def test_a_plain_layer_beside_a_scale_is_cut_like_any_other() -> None:
    plain = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = layer("a", plain, torch.ones(1, 1), "weight_scale_inv")
    loader = loader_from_config({"quant_method": "fp8", "weight_block_size": [128, 128]})

    for dim, load in ((0, Weights.get_weights_col), (1, Weights.get_weights_row)):
        ranks = [Weights(MemoryStorage(tensors), loader=loader, process_group=rank) for rank in FakeWorld(2)]
        assert torch.equal(torch.cat([load(rank, "a").dequantize() for rank in ranks], dim), plain.float())


def test_a_block_scale_that_is_not_there_is_asked_for_by_name() -> None:
    """The scales of all experts together are no layer's own, where nothing tells them apart."""
    tensors = {"experts.0.up_proj.weight": codes(8, 8), "experts.gate_up_proj_scale_inv": torch.ones(1, 1, 1)}
    loader = loader_from_config({"quant_method": "fp8", "weight_block_size": [128, 128]})

    with pytest.raises(MissingTensorError, match=r"experts\.0\.up_proj\.weight_scale_inv: not in the"):
        Weights(MemoryStorage(tensors), loader=loader).get_weights("experts.0.up_proj")
    with_them = Weights(with_experts(MemoryStorage(tensors), {}), loader=loader)
    assert torch.equal(with_them.get_weights("experts.0.up_proj").dequantize(), codes(8, 8).float())
