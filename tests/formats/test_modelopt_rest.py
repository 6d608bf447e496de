"""ModelOpt's further algorithms: SmoothQuant, NVFP4 with factors or a low-rank term, AWQ for FP8 inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import (
    ArgumentError,
    CutError,
    MismatchError,
    MissingTensorError,
    ShapeError,
    UnsupportedFormatError,
)
from qload.formats import ModelOptNVFP4ExtendedConfig, ModelOptNVFP4ExtendedWeight
from qload.formats.nvfp4 import LOW_RANK
from qload.kernels import bounds
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

FACTORS = torch.tensor([1, 2, 4, 0.5], dtype=torch.bfloat16)
INT8 = {
    "weight": torch.tensor([[1, -128, 3, 4], [127, 0, -2, 8]], dtype=torch.int8),
    "weight_scale": torch.tensor([0.5, 2]),
    "pre_quant_scale": FACTORS,
    "input_scale": torch.tensor(0.25),
}
LORA_A = torch.tensor([[1.0] * 16 + [2.0] * 16, [0.0] * 31 + [4.0]], dtype=torch.bfloat16)
LORA_B = torch.tensor([[1, 0], [0.5, -1]], dtype=torch.bfloat16)
NVFP4 = {
    "weight": torch.full((2, 16), 0x21, dtype=torch.uint8),  # the codes of 0.5 and 1 in turn
    "weight_scale": torch.tensor([[1, 2], [4, 8]]).to(torch.float8_e4m3fn),
    "weight_scale_2": torch.tensor(2.0),
}
SVD = {
    **NVFP4,
    "weight_quantizer._svdquant_lora_a": LORA_A,
    "weight_quantizer._svdquant_lora_b": LORA_B,
}
CODED = torch.tensor([[1.0, 2] * 8 + [2, 4] * 8, [4.0, 8] * 8 + [8, 16] * 8])
AWQ = {
    "weight": torch.tensor([[0x21, 0xF8, 0x70, 0x00]], dtype=torch.uint8),
    "weight_scale": torch.tensor([[1, 0.5], [2, 4]]),
    "weight_scale_2": torch.tensor(0.125),
    "input_scale": torch.tensor(0.5),
}
AWQ_VALUES = [[1, -8, 0, 0], [2 * 2, -1 * 2, 7 * 4, 0]]


def load(algorithm: str, *layers: dict[str, Tensor], rank: Rank | None = None) -> Weights:
    named = {f"{i}.{name}": tensor for i, one in enumerate(layers) for name, tensor in one.items()}
    loader = loader_from_config({"quant_method": "modelopt", "quant_algo": algorithm})
    return Weights(MemoryStorage(named), loader=loader, process_group=rank)


def test_int8_by_hand() -> None:
    weight = load("W8A8_SQ_PER_CHANNEL", INT8).get_weights("0")

    assert weight.dequantize().tolist() == [[0.5, -64, 1.5, 2], [254, 0, -4, 16]]


def test_every_code_of_int8_is_its_number() -> None:
    codes = torch.arange(-128, 128).reshape(2, 128)
    layer = {"weight": codes.to(torch.int8), "weight_scale": torch.tensor([0.5, 2])}

    weight = load("W8A8_SQ_PER_CHANNEL", layer).get_weights("0")

    assert torch.equal(weight.dequantize(), codes * layer["weight_scale"][:, None])


def test_int8_inputs_are_multiplied_by_their_factors_and_then_rounded() -> None:
    """x = 0.3 times 1, 2, 4, 0.5 is 1.2, 2.4, 4.8, 0.6 steps of 0.25, rounded to 1, 2, 5, 1."""
    weights = load("W8A8_SQ_PER_CHANNEL", INT8)
    weight = weights.get_weights("0")

    rounded = torch.tensor([1, 2, 5, 1]) * 0.25
    assert weight.get_linear()(torch.full((1, 4), 0.3)).tolist() == [(weight.dequantize() @ rounded).tolist()]
    assert weights.report().complete


def test_int8_shares_are_the_whole() -> None:
    whole = load("W8A8_SQ_PER_CHANNEL", INT8).get_weights("0").dequantize()
    columns, rows = (
        [getattr(load("W8A8_SQ_PER_CHANNEL", INT8, rank=rank), name)("0") for rank in FakeWorld(2)]
        for name in ("get_weights_col", "get_weights_row")
    )

    assert torch.equal(torch.cat([share.dequantize() for share in columns]), whole)
    assert torch.equal(torch.cat([share.dequantize() for share in rows], 1), whole)
    assert [share.input_factors.tolist() for share in rows] == [[1, 2], [4, 0.5]]


@pytest.mark.parametrize("name", ["input_scale", "weight_scale"])
def test_int8_scales_of_another_shape_are_refused(name: str) -> None:
    with pytest.raises(ShapeError, match=rf"0\.{name}: wrong shape"):
        load("W8A8_SQ_PER_CHANNEL", {**INT8, name: torch.ones(3)}).get_weights("0")


def test_a_low_rank_term_is_added() -> None:
    weight = load("NVFP4_SVD", SVD).get_weights("0")

    assert torch.equal(weight.dequantize(), CODED + LORA_B.float() @ LORA_A.float())
    assert torch.equal(weight.without_low_rank().dequantize(), CODED)


@pytest.mark.parametrize("power", [25, 40])
def test_a_low_rank_term_is_summed_in_float64(power: int) -> None:
    """2**25 + 1 - 2**25 is 1; float32 has no 2**25 + 1."""
    factors = torch.tensor([2.0**power, 1, -(2.0**power)])[:, None].expand(3, 32).contiguous()
    layer = {
        **SVD,
        "weight_quantizer._svdquant_lora_a": factors,
        "weight_quantizer._svdquant_lora_b": torch.ones(2, 3),
    }

    assert torch.equal(load("NVFP4_SVD", layer).get_weights("0").dequantize(), CODED + 1)


def test_a_low_rank_term_is_cut_with_its_layer() -> None:
    whole = load("NVFP4_SVD", SVD).get_weights("0").dequantize()
    for name, dim in (("get_weights_col", 0), ("get_weights_row", 1)):
        shares = [getattr(load("NVFP4_SVD", SVD, rank=rank), name)("0") for rank in FakeWorld(2)]
        assert torch.equal(torch.cat([share.dequantize() for share in shares], dim), whole)


@pytest.mark.parametrize("factor", [-1, 2])
def test_layers_with_low_rank_terms_are_not_fused(factor: int) -> None:
    other = {**SVD, "weight_quantizer._svdquant_lora_a": factor * LORA_A}

    with pytest.raises(MismatchError, match="differ in lora_a, from row 0 on"):
        load("NVFP4_SVD", SVD, other).get_multi_weights_col(["0", "1"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_linear_adds_the_low_rank_term_of_inputs_that_are_not_quantized(
    dtype: torch.dtype, quantized: bool
) -> None:
    scaled = {**SVD, "pre_quant_scale": torch.tensor([1.0, 2] * 16), "input_scale": torch.tensor(0.01)}
    weight = load("NVFP4_SVD", scaled).get_weights("0")
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    activations: Any = "declared" if quantized else "unquantized"

    linear = weight.get_linear(activations=activations)
    want = bounds.of_linear(x, weight, activations=activations)
    assert bool((bounds.excess(linear(x), want) <= 1).all())
    apart = weight.without_low_rank().get_linear(activations=activations)(x).float()
    term = (x.float() * scaled["pre_quant_scale"]) @ (LORA_B.float() @ LORA_A.float()).T
    assert (linear(x) - apart - term).abs().max() <= 4 * torch.finfo(dtype).eps * linear(x).abs().max()


def test_inputs_of_nvfp4_have_factors_where_they_are_stored() -> None:
    """ModelOpt folds the factors of q, k, v, gate and up projections into norms; these are plain NVFP4."""
    weights = load("NVFP4_AWQ", {**NVFP4, "pre_quant_scale": torch.tensor([1.0, 2] * 16)}, NVFP4)
    scaled, folded = weights.get_weights("0"), weights.get_weights("1")

    assert (scaled.format, folded.format) == ("modelopt_nvfp4_extended", "modelopt_nvfp4")
    assert torch.equal(scaled.dequantize(), CODED)
    assert scaled.get_linear(activations="unquantized")(torch.ones(1, 32)).tolist() == [
        (CODED @ torch.tensor([1.0, 2] * 16)).tolist()
    ]


def test_nvfp4_for_fp8_inputs_has_groups_of_32() -> None:
    layer = {**NVFP4, "weight_scale": torch.tensor([[1.0], [4]]).to(torch.float8_e4m3fn)}

    weight = load("W4A8_NVFP4_FP8", layer).get_weights("0")

    assert weight.dequantize().tolist() == [[1, 2] * 16, [4, 8] * 16]
    with pytest.raises(CutError, match="cuts must be multiples of 32 "):
        load("W4A8_NVFP4_FP8", layer, rank=Rank(0, 2)).get_weights_row("0")


def test_no_other_group_size_of_nvfp4_is_accepted() -> None:
    with pytest.raises(ArgumentError, match="group_size"):
        ModelOptNVFP4ExtendedConfig(64)


def test_a_low_rank_term_has_both_factors() -> None:
    with pytest.raises(ShapeError, match="lora_b"):
        ModelOptNVFP4ExtendedWeight(
            config=ModelOptNVFP4ExtendedConfig(low_rank=True), **NVFP4, lora_a=LORA_A, lora_b=LORA_B[:, :1]
        )


def test_the_second_scale_of_awq_for_fp8_inputs_is_no_factor() -> None:
    weights = load("W4A8_AWQ", AWQ)
    weight = weights.get_weights("0")

    assert weight.dequantize().tolist() == AWQ_VALUES
    assert weights.report().complete
    assert weight.get_linear()(torch.full((1, 4), 0.7)).tolist() == [
        (weight.dequantize() @ torch.full((4,), 0.6875)).tolist()  # 1.4 steps of 0.5, rounded to 11 / 8
    ]


@pytest.mark.parametrize("name", ["pre_quant_scale", *LOW_RANK])
@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_a_tensor_that_the_algorithm_does_not_read_is_refused(algorithm: str, name: str) -> None:
    layer = {**NVFP4, name: {**SVD, "pre_quant_scale": torch.ones(32)}[name]}

    with pytest.raises(UnsupportedFormatError, match=name) as caught:
        load(algorithm, layer).get_weights("0")
    assert f"0.{name}" in caught.value.reason
    assert "state" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "tensor", "error"),
    [
        (LOW_RANK[0], None, MissingTensorError),
        (LOW_RANK[1], None, MissingTensorError),
        (LOW_RANK[0], LORA_A.T.contiguous(), ShapeError),
        (LOW_RANK[1], LORA_B[:, :1], ShapeError),
    ],
)
def test_a_low_rank_term_that_does_not_fit_is_refused(
    name: str, tensor: Tensor | None, error: type[Exception]
) -> None:
    layer = {key: tensor if key == name else value for key, value in SVD.items()}

    with pytest.raises(error, match=r"_svdquant_lora_|0\.weight: wrong shape"):
        load("NVFP4_SVD", {key: value for key, value in layer.items() if value is not None}).get_weights("0")


def test_a_layer_of_another_format_is_not_read_without_its_factors() -> None:
    layer = {
        "weight": torch.ones(2, 32).to(torch.float8_e4m3fn),
        "weight_scale": torch.tensor(0.5),
        "pre_quant_scale": torch.ones(32),
    }

    with pytest.raises(MissingTensorError, match="weight_scale_2"):
        load("NVFP4", layer).get_weights("0")
    del layer["pre_quant_scale"]
    assert load("NVFP4", layer).get_weights("0").format == "fp8"


def test_the_name_of_a_missing_factor_is_stated_for_layers_of_whole_tiles() -> None:
    """Scales of 128 outputs and 64 inputs have the same shape in the order of tensor cores."""
    layer = {
        "weight": torch.full((128, 32), 0x21, dtype=torch.uint8),
        "weight_scale": torch.ones(128, 4).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(2.0),
        LOW_RANK[0]: torch.ones(2, 64),
    }

    with pytest.raises(MissingTensorError, match=r"0[.]weight_quantizer[.]_svdquant_lora_b"):
        load("NVFP4_SVD", layer).get_weights("0")
