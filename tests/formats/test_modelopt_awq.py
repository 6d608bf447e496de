"""ModelOpt's AWQ: two outputs a byte, and inputs that are multiplied before the weight."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.errors import ArgumentError, CutError, MismatchError, ShapeError
from qload.formats import ModelOptAWQConfig, ModelOptAWQWeight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.verify import verify
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

LAYER = {
    "weight": torch.tensor([[0x21, 0xF8, 0x70, 0x00]], dtype=torch.uint8),
    "weight_scale": torch.tensor([[1, 0.5], [2, 4]]),
    "pre_quant_scale": torch.tensor([1, 2, 4, 0.5], dtype=torch.bfloat16),
}
MEANT = [[1, -8, 0, 0], [2 * 2, -1 * 2, 7 * 4, 0]]


def weights(*layers: dict[str, Tensor], size: int = 0, rank: Rank | None = None) -> Weights:
    named = {f"{i}.{name}": tensor for i, one in enumerate(layers) for name, tensor in one.items()}
    loader = FormatLoader(ConfiguredFormat(ModelOptAWQWeight, ModelOptAWQConfig(size)))
    return Weights(MemoryStorage(named), loader=loader, process_group=rank)


def without(layer: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in layer.items() if key != name}


def test_one_layer_by_hand() -> None:
    """The low halves are the even output: 1, -8, 0, 0; the high ones the odd: 2, -1, 7, 0; of two groups."""
    weight = ModelOptAWQWeight(config=ModelOptAWQConfig(2), **LAYER)

    assert weight.dequantize().tolist() == MEANT


def test_inputs_are_multiplied_by_the_layer_and_not_by_the_weight() -> None:
    weight = weights(LAYER).get_weights("0")
    x = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 1]])

    assert weight.dequantize().tolist() == MEANT
    assert weight.get_linear()(x).tolist() == [[1 - 16, 4 - 4 + 28 * 4], [0, 0]]
    apart = weights(without(LAYER, "pre_quant_scale")).get_weights("0")
    assert apart.get_linear()(x).tolist() == [[-7, 4 - 2 + 28], [0, 0]]


def test_the_factors_of_a_row_share_are_those_of_its_inputs() -> None:
    shares = [weights(LAYER, rank=rank).get_weights_row("0") for rank in FakeWorld(2)]
    x = torch.ones(1, 2)

    assert [share.input_factors.tolist() for share in shares] == [[1, 2], [4, 0.5]]
    assert sum(share.get_linear()(x) for share in shares).tolist() == [[1 - 16, 4 - 4 + 28 * 4]]


@pytest.mark.parametrize(
    ("size", "groups", "said"), [(0, 2, 2), (0, 1, -1), (0, 4, 1), (2, 2, 2), (4, 1, -1)]
)
def test_where_no_config_says_the_size_of_a_group_the_scales_do(size: int, groups: int, said: int) -> None:
    layer = {**LAYER, "weight_scale": torch.ones(2, groups)}

    assert weights(layer, size=size).get_weights("0").config.group_size == said


@pytest.mark.parametrize(("size", "groups"), [(0, 3), (0, 0), (2, 4), (4, 2)])
def test_groups_that_do_not_fit_are_refused(size: int, groups: int) -> None:
    layer = {**LAYER, "weight_scale": torch.ones(2, groups)}

    with pytest.raises(ShapeError, match=r"0\.weight_scale: wrong shape"):
        weights(layer, size=size).get_weights("0")


def test_an_output_is_not_cut_from_the_byte_it_is_in() -> None:
    with pytest.raises(CutError, match="cuts must be multiples of 2 "):
        weights(LAYER, rank=Rank(0, 2)).get_weights_col("0")


def test_layers_whose_inputs_are_scaled_alike_are_fused() -> None:
    fused = weights(LAYER, LAYER).get_multi_weights_col(["0", "1"])

    assert fused.dequantize().tolist() == [*MEANT, *MEANT]
    assert fused.get_linear()(torch.ones(1, 4)).tolist() == [[-15, 112] * 2]


@pytest.mark.parametrize("at", [0, 3])
def test_layers_whose_inputs_are_scaled_otherwise_are_not_fused(at: int) -> None:
    factors = LAYER["pre_quant_scale"].clone()
    factors[at] = 8

    with pytest.raises(MismatchError, match=f"differ in pre_quant_scale, from row {at} on"):
        weights(LAYER, {**LAYER, "pre_quant_scale": factors}).get_multi_weights_col(["0", "1"])


def test_layers_of_which_one_scales_its_inputs_are_not_fused() -> None:
    with pytest.raises(MismatchError, match="differ in tensors"):
        weights(LAYER, without(LAYER, "pre_quant_scale")).get_multi_weights_col(["0", "1"])


def test_a_size_that_no_group_has_is_refused() -> None:
    with pytest.raises(ArgumentError, match="modelopt_awq: group_size"):
        ModelOptAWQConfig(-2)


def test_a_reference_is_compared_with_what_the_layer_does_to_inputs(tmp_path: Path) -> None:
    weight = weights(LAYER).get_weights("0")
    section = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}
    for name, tensors, config in (
        ("awq", {f"up.{key}": tensor for key, tensor in LAYER.items()}, {"quantization_config": section}),
        ("same", {"up.weight": weight.dequantize() * LAYER["pre_quant_scale"].float()}, {}),
        ("other", {"up.weight": weight.dequantize().flip(0)}, {}),
    ):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config))

    assert verify(tmp_path / "awq", against=tmp_path / "same").findings == ()
    assert verify(tmp_path / "awq", against=tmp_path / "other").findings != ()
