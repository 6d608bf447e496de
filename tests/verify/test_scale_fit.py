"""Scales of another layer, in comparison with the float original; valid layers have large distances, too."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qload.spec import Codes
from qload.verify import verify
from qload.verify.comparison import ScaleFit
from tests.example_counts import some
from tests.verify.damage.model import Model
from tests.verify.damage.sound import MODELS
from tests.verify.damage.sound_floats import MORE

FORMATS = ("nf4", "nvfp4", "mxfp4", "mxfp8", "asymmetric")  # with four or more groups per output
N, K = 512, 1024


def exchanged(model: Model, projection: str) -> Model:
    """Exchange the scales of one projection between two layers."""
    model = copy.deepcopy(model)
    one = next(name for name in model.codes() if f".0.{projection}." in name)
    other = one.replace(".0.", ".1.", 1)
    here, there = model.scales(one), model.scales(other)
    model.tensors[here], model.tensors[there] = model.tensors[there], model.tensors[here]
    return model


@pytest.mark.parametrize("form", some(FORMATS, 2))
def test_scales_of_another_layer_are_told_beside_the_original(form: str, tmp_path: Path) -> None:
    original = MODELS["plain"]().write(tmp_path / "original")
    damaged = exchanged(MORE[form](), "mlp.down_proj").write(tmp_path / "damaged")
    found = verify(damaged, against=original).findings

    assert {each.tensor for each in found} == {f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)}
    assert all("they are another layer's" in each.message for each in found)


@pytest.mark.parametrize("form", some(sorted(set(MORE) - {"plain"}), 4))
def test_a_sound_model_has_no_finding_beside_its_original(form: str, tmp_path: Path) -> None:
    original = MODELS["plain"]().write(tmp_path / "original")

    assert verify(MORE[form]().write(tmp_path / "sound"), against=original).findings == ()


def quantized(weight: Tensor, size: int, bits: int) -> Codes:
    groups = weight.reshape(N, -1, size)
    scales = groups.abs().amax(2) / (2 ** (bits - 1) - 0.5)
    middle = 2 ** (bits - 1)
    codes = (groups / scales[..., None]).round().add(middle).clamp(0, 2 * middle - 1).reshape(N, K).int()
    zeros = torch.full(scales.shape, middle, dtype=torch.int32)
    return Codes(bits=bits, codes=codes, scales=scales, zeros=zeros, k_group=torch.arange(K) // size)


def fitted(codes: Codes, original: Tensor) -> ScaleFit:
    fit = ScaleFit()
    for start in range(0, N, 128):
        rows = slice(start, start + 128)
        assert isinstance(codes.codes, Tensor)
        assert codes.zeros is not None
        fit.add(
            Codes(
                codes.bits, codes.codes[rows], codes.scales[rows], codes.zeros[rows], k_group=codes.k_group
            ),
            original[rows],
        )
    return fit


def test_an_output_whose_codes_have_the_other_sign_is_not_counted() -> None:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    codes, opposite = quantized(weight, 128, 4), weight.clone()
    opposite[::2] *= -1

    assert fitted(codes, opposite).count == fitted(codes, weight).count // 2 == N * K // 128 // 2


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scales_follow_an_original_that_is_far_off(size: int, bits: int) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(N, K, generator=draw)
    inputs = (torch.randn(K, generator=draw) * 0.5).exp()
    outputs = torch.randn(N, 1, generator=draw).exp()

    for made in (weight + 0.8 * torch.randn(N, K, generator=draw), weight * inputs, weight * outputs):
        codes = quantized(made, size, bits)
        assert fitted(codes, weight).mistake() is None

        wrong = Codes(bits, codes.codes, codes.scales.roll(7, 0), codes.zeros, k_group=codes.k_group)
        assert fitted(wrong, weight).mistake() is not None


def test_nothing_is_said_of_few_groups_and_of_scales_that_hardly_differ() -> None:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    few = quantized(weight, 512, 4)
    alike = quantized(weight, 32, 4)
    alike.scales.fill_(0.4)

    assert fitted(few, weight).correlation is None
    assert fitted(alike, weight).correlation is None
