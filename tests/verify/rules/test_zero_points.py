"""How far codes may be from their zero points on average: by how much is averaged, and what was measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.layouts import Stored, compressed_tensors
from qload.spec.weight import LayerClaims
from qload.verify import verify
from qload.verify.rules.rule import CONVENTION_KEY, convention_contradiction
from tests.verify.damage import planted
from tests.verify.damage.model import Model
from tests.verify.damage.sound import Quantize, modelled
from tests.verify.damage.sound_floats import asymmetric, compressed
from tests.verify.test_drawn_models import config_of, of_type

pytestmark = pytest.mark.usefixtures("seen_texts")

RULE = "zero-point-mean"


def with_means(size: float, seed: int, inputs: int | None = None) -> Model:
    """Weights of which each input has a mean of its own, `size` times as large as they vary."""
    draw = torch.Generator().manual_seed(seed)

    def make(quantize: Quantize, said: dict[str, Any] | None) -> Model:
        def shifted(weight: Tensor) -> dict[str, Tensor]:
            kept = weight if inputs is None else weight[:, :inputs]
            return quantize(kept + torch.randn(kept.shape[1], generator=draw) * 0.05 * size)

        return modelled(shifted, said)

    return asymmetric(make=make)


def found(model: Model, folder: Path) -> list[str]:
    findings = verify(model.write(folder / "model")).findings
    return [finding.tensor or "" for finding in findings if finding.rule == RULE]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [0.5, 1, 2])
def test_inputs_with_means_of_their_own_are_sound(size: float, seed: int, tmp_path: Path) -> None:
    assert found(with_means(size, seed, inputs=64), tmp_path) == []


@pytest.mark.parametrize("plant", [planted.zeros_one_higher, planted.zeros_one_lower])
@pytest.mark.parametrize("size", [0, 0.25])
def test_zero_points_off_by_one_are_told_beside_such_means(
    size: float, plant: planted.Plant, tmp_path: Path
) -> None:
    model = with_means(size, 0)
    plant(model)

    assert len(found(model, tmp_path)) == 14


def test_one_layer_whose_zero_points_are_off_is_told(tmp_path: Path) -> None:
    model, name = with_means(0, 0), "model.layers.1.mlp.up_proj.weight_zero_point"
    sound = model.tensors[name]
    planted.zeros_one_higher(model)
    damaged = model.tensors[name]
    model = with_means(0, 0)
    model.tensors[name] = damaged

    assert not damaged.equal(sound)
    assert found(model, tmp_path) == [name]


def full_range(size: int) -> Model:
    """Symmetric words whose groups have their largest weight, of either sign, at the first code."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        groups = weight.reshape(len(weight), -1, size)
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scales = -largest / 8
        codes = (groups / scales).round().clamp(-8, 7).reshape_as(weight).int() + 8
        zeros = torch.full(scales.shape[:2], 8, dtype=torch.int32).T.contiguous()
        return {
            "weight_packed": compressed_tensors.pack(codes, 4, True),
            "weight_scale": scales[..., 0].bfloat16(),
            "weight_zero_point": compressed_tensors.pack(zeros, 4, True).T.contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }

    said = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=size)
    said["config_groups"]["group_0"]["weights"]["symmetric"] = False
    return of_type(config_of("llama", 2), 0)(quantize, said)


@pytest.mark.parametrize("size", [8, 16, 32])
def test_zero_points_in_the_middle_are_sound_whatever_the_mean(size: int, tmp_path: Path) -> None:
    assert found(full_range(size), tmp_path) == []


def test_zero_points_all_one_beside_the_middle_are_told(tmp_path: Path) -> None:
    model = full_range(32)
    for name in [name for name in model.tensors if name.endswith("weight_zero_point")]:
        model.tensors[name].fill_(0x77777777)

    assert len(found(model, tmp_path)) == 14


@pytest.mark.parametrize("has_config", [False, True])
def test_only_a_setting_of_the_convention_is_contradicted(has_config: bool) -> None:
    claims = LayerClaims(convention="" if has_config else CONVENTION_KEY)
    found: Any = SimpleNamespace(claims=SimpleNamespace(file="config.json") if has_config else None)

    assert convention_contradiction(found, claims, Stored()) is None
