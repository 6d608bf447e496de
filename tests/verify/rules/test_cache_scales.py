"""Scales of the key/value cache: known under every name that engines use, and checked."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qload.verify import verify
from tests.verify.checkpoints import GPTQ, gptq, model, rules

pytestmark = pytest.mark.usefixtures("seen_texts")

ATTENTION = "model.layers.0.self_attn"
HEADS = {"num_key_value_heads": 2, "num_attention_heads": 4}
NAMES = [
    "k_proj.k_scale", "v_proj.v_scale", "qkv_proj.k_scale", "k_proj.output_scale", "v_proj.output_scale",
    "k_scale", "v_scale", "q_scale", "kv_scale", "attn.k_scale", "attn.kv_scale", "prob_output_scale",
    "kv_cache_scaling_factor",
]  # fmt: skip
ZEROS = ["k_zero_point", "v_zero_point", "k_proj.k_bias", "v_proj.v_bias"]


def checkpoint(folder: Path, name: str, tensor: Tensor, **config: int) -> Path:
    tensors = {**gptq(f"{ATTENTION}.k_proj"), **gptq(f"{ATTENTION}.v_proj")}
    return model(folder, {**tensors, f"{ATTENTION}.{name}": tensor}, quantization_config=GPTQ, **config)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1, 1), (1, 4, 1)])
def test_a_sound_scale_is_exempt_under_every_name(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    report = verify(checkpoint(tmp_path, name, torch.full(shape, 0.5), **HEADS))

    assert report.findings == ()
    assert report.coverage is not None
    assert report.coverage.explained == report.coverage.total
    assert report.coverage.exempt


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        pytest.param(torch.tensor(0.0), "0 at 0, it has to be a finite number above 0; 1 in all", id="zero"),
        pytest.param(torch.tensor([1.0, -2.0]), "-2 at 1", id="negative"),
        pytest.param(torch.tensor([float("inf")]), "inf at 0", id="infinite"),
        pytest.param(torch.ones(3), "one scale, or one a head, of 2 or 4 heads", id="three"),
        pytest.param(torch.ones(2, 2), "shape (2, 2)", id="a matrix"),
        pytest.param(torch.ones(1, dtype=torch.int32), "a scale of dtype int32", id="a whole number"),
    ],
)
def test_what_nothing_can_be_divided_by_is_found(
    name: str, tensor: Tensor, said: str, tmp_path: Path
) -> None:
    report = verify(checkpoint(tmp_path, name, tensor, **HEADS))

    (finding,) = [finding for finding in report.findings if finding.rule == "cache-scale"]
    assert finding.tensor == f"{ATTENTION}.{name}"
    assert finding.message.startswith(f"{ATTENTION}.{name}: ")
    assert said in finding.message


def test_without_a_count_of_heads_any_number_of_them_is_lawful(tmp_path: Path) -> None:
    assert rules(verify(checkpoint(tmp_path, "k_scale", torch.ones(3)))) == set()


@pytest.mark.parametrize("name", ZEROS)
def test_zero_points_and_biases_of_a_cache_are_finite_and_nothing_else(name: str, tmp_path: Path) -> None:
    sound, nan, cube = (tmp_path / each for each in ("sound", "nan", "cube"))
    for folder, tensor in (
        (sound, torch.tensor([-1.0, 0.0]).view(1, 2, 1, 1)),
        (nan, torch.tensor([float("nan")])),
        (cube, torch.ones(2, 2, 2)),
    ):
        folder.mkdir()
        checkpoint(folder, name, tensor)

    assert rules(verify(sound)) == set()
    assert "cache-scale" in rules(verify(nan))
    assert rules(verify(cube)) == {"cache-scale"}


@pytest.mark.parametrize(
    "name", ["o_proj.k_scale", "k_proj.q_scale", "output_scale", "k_proj.scale", "k_bias"]
)
def test_a_name_that_is_almost_one_is_none(name: str, tmp_path: Path) -> None:
    report = verify(checkpoint(tmp_path, name, torch.tensor(0.0)))

    assert "cache-scale" not in rules(report)
    assert report.coverage is not None
    assert not report.coverage.exempt
