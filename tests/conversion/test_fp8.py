"""FP8 from one dialect to another: equal bytes, scales and activation scheme; or an error."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qload import convert, diff, open_checkpoint, verify
from qload.conversion import Conversion
from qload.conversion.output_files import OutputItem
from qload.conversion.quantization_config import quantization_config
from qload.conversion.targets import OutputLayer
from qload.formats import Fp8Config, Fp8Weight
from qload.spec import ActivationScheme
from qload.testing import make_checkpoint
from tests.paths import FIXTURES
from tests.verify.checkpoints import model

pytestmark = pytest.mark.usefixtures("seen_texts")

BLOCKS = {"quant_method": "fp8", "weight_block_size": [4, 8], "activation_scheme": "dynamic"}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}


def codes(*shape: int) -> torch.Tensor:
    """Return codes of every byte except NaN, in order."""
    count = torch.Size(shape).numel()
    found = torch.arange(count).remainder(126).to(torch.uint8)
    return (found + 128 * (torch.arange(count) % 2).to(torch.uint8)).view(torch.float8_e4m3fn).reshape(shape)


def source(folder: Path, scale: torch.Tensor, section: dict[str, Any], **more: torch.Tensor) -> Path:
    """Write one layer (8, 16); `more` or blocks determine the name of its scale."""
    name = "weight_scale_inv" if "weight_block_size" in section else "weight_scale"
    folder.mkdir()
    stored = {
        "a.weight": codes(8, 16),
        f"a.{name}": scale,
        **{f"a.{key}": value for key, value in more.items()},
    }
    return model(folder, stored, quantization_config=section)


def inputs(folder: Path, prefix: str = "a") -> ActivationScheme | None:
    with open_checkpoint(folder) as weights:
        return weights.get_weights(prefix).activations


def weights_of(folder: Path) -> dict[str, Any]:
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = section["config_groups"].values()
    return {**group["weights"], "format": section["format"]}


def reasons(found: Conversion) -> set[str]:
    assert found.verdict == "findings"
    return {layer.detail for layer in found.layers}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_keep_their_bytes_and_scales_under_the_name_of_the_target(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    scale = torch.tensor([[1, 3], [5, 7]]).to(dtype)
    found = convert(source(tmp_path / "in", scale, BLOCKS), tmp_path / "out", to="fp8")
    stored = load_file(tmp_path / "out" / "model.safetensors")

    assert found.counts == {"bits": 1}
    assert stored.keys() == {"a.weight", "a.weight_scale"}
    assert torch.equal(stored["a.weight_scale"], scale)
    assert torch.equal(stored["a.weight"].view(torch.uint8), codes(8, 16).view(torch.uint8))
    said = weights_of(tmp_path / "out")
    assert (said["strategy"], said["block_structure"], said["format"]) == ("block", [4, 8], "float-quantized")
    assert inputs(tmp_path / "out") == replace(
        inputs(tmp_path / "in") or pytest.fail("none"), owner="compressed-tensors"
    )
    assert found.notes == [
        "scales of inputs (float8 group of 8 dynamic) follow the rule of transformers in the source, of "
        "compressed-tensors in the output"
    ]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_of_all_and_of_inputs_that_is_stored(shape: tuple[int, ...], tmp_path: Path) -> None:
    scale, given = torch.full(shape, 0.5), torch.tensor(0.25)
    found = convert(source(tmp_path / "in", scale, PER_TENSOR, input_scale=given), tmp_path / "out", to="fp8")
    stored = load_file(tmp_path / "out" / "model.safetensors")

    assert (found.verdict, found.notes) == ("ok", [])
    assert (stored["a.weight_scale"].tolist(), stored["a.input_scale"].tolist()) == ([0.5], [0.25])
    scheme = inputs(tmp_path / "out")
    assert scheme is not None
    assert (scheme.dynamic, scheme.strategy, scheme.scale) == (False, "tensor", "input_scale")


@pytest.mark.parametrize("shape", [(8,), (8, 1), (1, 8)])
def test_a_scale_for_each_output_is_a_column(shape: tuple[int, ...], tmp_path: Path) -> None:
    section = {"quant_method": "fp8"}
    scale = torch.arange(1, 9).float().reshape(shape)
    unused = torch.tensor(0.25)
    found = convert(source(tmp_path / "in", scale, section, input_scale=unused), tmp_path / "out", to="fp8")
    stored = load_file(tmp_path / "out" / "model.safetensors")

    assert found.verdict == "ok"
    assert stored.keys() == {"a.weight", "a.weight_scale"}
    assert stored["a.weight_scale"].tolist() == [[value] for value in range(1, 9)]
    assert weights_of(tmp_path / "out")["strategy"] == "channel"
    assert inputs(tmp_path / "out") is None


def test_powers_of_two_become_float32(tmp_path: Path) -> None:
    scale = torch.tensor([[0.5, 2.0], [4.0, 1.0]]).to(torch.float8_e8m0fnu)
    convert(source(tmp_path / "in", scale, BLOCKS), tmp_path / "out", to="fp8")
    stored = load_file(tmp_path / "out" / "model.safetensors")["a.weight_scale"]

    assert (stored.dtype, stored.tolist()) == (torch.float32, [[0.5, 2.0], [4.0, 1.0]])


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("activations/fbgemm_fp8_token_dynamic_bounded", "float8 token dynamic, at most 2"),
        ("activations/fp8_tensor_dynamic", "float8 tensor dynamic"),
        ("models/gptq_mixtral", "gptq is not FP8 with scales, and convert does not quantize"),
        ("activations/mxfp8_dynamic", "mxfp8 is not FP8 with scales, and convert does not quantize"),
    ],
)
def test_what_it_does_not_say_is_refused(folder: str, reason: str, tmp_path: Path) -> None:
    found = convert(FIXTURES / folder, tmp_path / "out", to="fp8")

    assert all(reason in told for told in reasons(found))
    assert not (tmp_path / "out").exists()


def test_stacked_experts_become_tensors_of_their_own(tmp_path: Path) -> None:
    found = convert(FIXTURES / "experts/model_fp8_block_llama4", tmp_path / "out", to="fp8")

    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert found.counts.keys() == {"bits"}
    assert {
        f"model.layers.0.feed_forward.experts.1.{part}_proj.weight" for part in ("gate", "up", "down")
    } <= names


def test_scales_that_divide_and_other_floats_are_refused(tmp_path: Path) -> None:
    divides = {"quant_method": "fp8", "weight_scale_method": "tensor", "weight_scale_semantics": "inverse"}
    folder = tmp_path / "divides"
    folder.mkdir()
    model(
        folder,
        {"a.weight": codes(8, 16), "a.weight_scale_inv": torch.tensor([3.0])},
        quantization_config=divides,
    )
    other = tmp_path / "e5m2"
    other.mkdir()
    stored = {"a.weight": codes(8, 16).float().to(torch.float8_e5m2), "a.weight_scale": torch.tensor(1.0)}
    model(other, stored, quantization_config={"quant_method": "fp8", "fmt": "e5m2"})

    assert "its scales divide" in reasons(convert(folder, tmp_path / "out", to="fp8")).pop()
    assert "needs weights in float8_e4m3fn, got float8_e5m2" in reasons(
        convert(other, tmp_path / "out", to="fp8")
    )


def test_a_scale_for_each_part_of_a_fused_layer_is_refused(tmp_path: Path) -> None:
    stored = {"qkv_proj.weight": codes(48, 16), "qkv_proj.weight_scale": torch.tensor([1.0, 2, 3])}
    source = model(tmp_path, stored, quantization_config={"quant_method": "fp8"})

    assert reasons(convert(source, tmp_path / "out", to="fp8")) == {
        "each of its fused parts has its own scale, which the format cannot store"
    }


def test_what_is_kept_would_need_two_dialects(tmp_path: Path) -> None:
    make_checkpoint("fp8-block", tmp_path / "in")
    found = convert(tmp_path / "in", tmp_path / "out", to="fp8", keep=["*.q_proj"])

    assert {layer.name.rpartition(".")[2] for layer in found.layers} == {"q_proj"}
    assert "another dialect of fp8" in reasons(found).pop()


@pytest.mark.parametrize("folder", ["fp8_channel_deepseek_v3"])
def test_a_whole_model_and_back_to_floats(folder: str, tmp_path: Path) -> None:
    first = FIXTURES / "models" / folder
    assert convert(first, tmp_path / "fp8", to="fp8").counts.keys() == {"bits"}
    assert convert(tmp_path / "fp8", tmp_path / "plain", to="float32").verdict == "ok"

    assert diff(first, tmp_path / "plain").counts.keys() == {"bits"}
    assert verify(tmp_path / "fp8").verdict == "ok"


def test_layers_of_two_kinds_have_a_group_each(tmp_path: Path) -> None:
    folder = source(tmp_path / "in", torch.tensor([1.0]), {"quant_method": "fp8"})
    stored = load_file(folder / "model.safetensors")
    for name in ("b", "c"):
        stored |= {f"{name}.weight": codes(8, 16), f"{name}.weight_scale": torch.ones(8, 1)}
    save_file(stored, folder / "model.safetensors")
    found = convert(folder, tmp_path / "out", to="fp8")
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "config_groups"
    ]

    assert found.counts == {"bits": 3}
    assert [(each["targets"], each["weights"]["strategy"]) for each in groups.values()] == [
        (["Linear"], "channel"),
        (["a"], "tensor"),
    ]


@pytest.mark.parametrize(("to", "kept"), [("fp8", True), ("bfloat16", False)])
def test_how_the_cache_is_quantized_goes_along_or_is_noted(to: str, kept: bool, tmp_path: Path) -> None:
    convert(source(tmp_path / "in", torch.tensor(1.0), {"quant_method": "fp8"}), tmp_path / "a", to="fp8")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    said = json.loads((tmp_path / "a" / "config.json").read_text())
    said["quantization_config"]["kv_cache_scheme"] = scheme
    (tmp_path / "a" / "config.json").write_text(json.dumps(said))
    found = convert(tmp_path / "a", tmp_path / "b", to=to)
    config = tmp_path / "b" / "config.json"
    after = json.loads(config.read_text()).get("quantization_config", {}) if config.exists() else {}

    assert found.verdict == "ok"
    assert (after.get("kv_cache_scheme") == scheme) is kept
    assert any("kv_cache_scheme" in note for note in found.notes) is not kept


def test_blocks_of_two_sizes_have_a_group_each() -> None:
    item = OutputItem({}, 0, lambda: iter(()))
    layers = [
        OutputLayer(name, Fp8Weight, Fp8Config("block", block), 16, item=item)
        for name, block in (("a", (4, 8)), ("b", (8, 8)), ("c", (4, 8)))
    ]
    said = quantization_config(layers, []).values or {}

    assert [
        (each["targets"], each["weights"]["block_structure"]) for each in said["config_groups"].values()
    ] == [(["Linear"], [4, 8]), (["b"], [8, 8])]
