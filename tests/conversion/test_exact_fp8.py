"""Plain weights in FP8: exact, with the fewest possible scales, or an error for the whole checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from qload import convert, diff, verify
from qload.conversion import fp8
from qload.conversion.fp8 import exact_scales
from qload.errors import ArgumentError, RepackError
from qload.loader import LayerDescription
from qload.testing import make_checkpoint
from qload.verify.checkpoint import VerifiedCheckpoint
from tests.paths import FIXTURES
from tests.verify.checkpoints import model

LLAMA = "model.layers.0.mlp.up_proj"
E4M3 = torch.float8_e4m3fn
UNITS = {"tensor": (1, 1), "channel": (160, 1), "block": (2, 3)}


def codes(N: int, K: int, seed: int = 0) -> torch.Tensor:
    """Return codes of every byte except NaN."""
    drawn = torch.randint(0, 254, (N, K), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return (drawn + (drawn >= 127)).view(E4M3).float()


def spread(scales: torch.Tensor, N: int, K: int) -> torch.Tensor:
    """Expand scales to (N, K): one scale, one per output, or one per block of 128 x 128."""
    rows = scales.repeat_interleave(128 if scales.shape[1] > 1 else 1, 0)[:N]
    return rows.repeat_interleave(128, 1)[:, :K] if scales.shape[1] > 1 else rows.expand(N, K)


@given(per=st.sampled_from([*UNITS]), seed=st.integers(0, 2**20), low=st.integers(-40, 20))
def test_scales_of_any_size_are_found_and_as_few_as_there_are(per: str, seed: int, low: int) -> None:
    """Products are rounded to float32: a scale does not divide the largest product exactly."""
    N, K = 160, 300
    drawn = torch.rand(UNITS[per], generator=torch.Generator().manual_seed(seed)) + 0.5
    values = codes(N, K, seed) * spread(drawn * 2.0**low, N, K)

    found = exact_scales(values)

    assert found is not None
    assert found.config.per == per
    assert found.scales.shape == ((1,) if per == "tensor" else UNITS[per])
    back = found.codes(values).float() * spread(found.scales.reshape(UNITS[per]), N, K)
    assert torch.equal(back, values)


def test_scales_by_hand() -> None:
    """The largest of -0.75, 3 and 14 is code 448 with scale 1 / 32; the scale of zeros is 1."""
    channels = torch.tensor([[-0.75, 3.0, 14.0], [0.0, -0.0, 0.0], [5.0, 0.0, 5.0]])

    found = exact_scales(torch.cat([channels, channels * torch.tensor([[3.3], [1.0], [0.7]])]))

    assert found is not None
    assert found.config.per == "channel"
    assert found.scales[:3].flatten().tolist() == [1 / 32, 1.0, 5 / 256]
    assert found.codes(channels)[0].tolist() == [-24.0, 96.0, 448.0]
    assert found.codes(channels)[1].view(torch.uint8).tolist() == [0, 128, 0]


@pytest.mark.parametrize("largest", range(8, 16))
def test_the_largest_of_a_unit_may_have_any_significand(largest: int) -> None:
    values = torch.tensor([[float(largest), 5.0, 7.0, -0.75]]) * 0.3

    assert exact_scales(values) is not None


@pytest.mark.parametrize("per", UNITS)
def test_outputs_are_looked_at_in_runs_of_whole_blocks(per: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "BLOCK_VALUES", 1)
    N, K = 160, 300
    wanted = spread(torch.arange(1, 1 + UNITS[per][0] * UNITS[per][1]).reshape(UNITS[per]) / 3, N, K)
    values = codes(N, K) * wanted

    found = exact_scales(values)

    assert found is not None
    assert found.config.per == per
    assert torch.equal(found.codes(values).float() * spread(found.scales.reshape(UNITS[per]), N, K), values)


@pytest.mark.parametrize("value", [1.0 + 2**-5, float("nan"), float("inf"), 2.0**-40])
def test_one_value_that_is_none_leaves_no_scale(value: float) -> None:
    values = codes(256, 256) * 0.37
    assert exact_scales(values) is not None
    values[-1, -1] = 448 * 0.37 * value

    assert exact_scales(values) is None


def test_bfloat16_and_float16_are_looked_at_as_what_they_mean() -> None:
    values = codes(128, 128) * 0.25

    assert exact_scales(values.bfloat16()) is not None
    assert exact_scales((codes(128, 128) * 0.3).bfloat16()) is None
    assert exact_scales(values.half()) is not None


@pytest.mark.parametrize("folder", ["fp8_channel_deepseek_v3"])
def test_another_tools_checkpoint_comes_back_from_floats(folder: str, tmp_path: Path) -> None:
    first = FIXTURES / "models" / folder
    convert(first, tmp_path / "plain", to="float32")
    refused = convert(tmp_path / "plain", tmp_path / "fp8", to="fp8")
    kept = [layer.name for layer in refused.layers]

    assert {name.rpartition(".")[2] for name in kept} == {"gate"}  # a router, plain in the source
    assert not (tmp_path / "fp8").exists()
    assert convert(tmp_path / "plain", tmp_path / "fp8", to="fp8", keep=kept).counts.keys() == {"bits"}
    assert diff(first, tmp_path / "fp8").counts.keys() == {"bits"}
    assert verify(tmp_path / "fp8").verdict == "ok"


def test_embeddings_and_heads_stay_plain(tmp_path: Path) -> None:
    make_checkpoint("fp8-block", tmp_path / "first")
    convert(tmp_path / "first", tmp_path / "plain", to="float32")
    convert(tmp_path / "plain", tmp_path / "fp8", to="fp8")
    stored = load_file(tmp_path / "fp8" / "model.safetensors")

    assert {name for name, tensor in stored.items() if tensor.dtype == E4M3} == {
        name for name in stored if name.endswith("_proj.weight")
    }
    section = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in section["ignore"]
    assert all(group["input_activations"] is None for group in section["config_groups"].values())


def test_a_layer_without_such_scales_refuses_all_and_others_may_be_kept(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    stored = {"a.weight": codes(8, 16), "b.weight": torch.full((8, 16), 1.0) + torch.rand(8, 16)}
    model(source, stored)

    found = convert(source, tmp_path / "out", to="fp8")

    assert (found.verdict, [layer.name for layer in found.layers]) == ("findings", ["b"])
    assert "in float8_e4m3fn exactly, and convert does not quantize" in found.layers[0].detail
    assert not (tmp_path / "out").exists()
    assert convert(source, tmp_path / "out", to="fp8", keep=["b"]).verdict == "ok"
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["b.weight"], stored["b.weight"])


def test_a_stack_is_refused_before_its_values_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path, {"a.weight": codes(8, 16)})
    monkeypatch.setattr(fp8, "load_layer", None)

    with VerifiedCheckpoint.open(tmp_path, collect=True) as checkpoint:
        layer = checkpoint.layers["a"]
        assert isinstance(layer, LayerDescription)
        stack = replace(layer, sizes={"E": 2, **layer.sizes})
        with pytest.raises(
            RepackError, match=r"it has the axes E, N, K, and only a matrix \(N, K\) has scales"
        ):
            fp8.plain_item(checkpoint, stack)


@pytest.mark.usefixtures("seen_texts")
def test_other_targets_have_nothing_to_convert_in_a_plain_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    model(source, {"a.weight": codes(8, 16)})

    for to in ("gptq", "float16"):
        with pytest.raises(ArgumentError, match="only plain or kept layers"):
            convert(source, tmp_path / "out", to=to)
