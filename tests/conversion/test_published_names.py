"""Names of transformers for a checkpoint with the names of DeepSeek V4, and what refuses them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload import convert, diff, open_checkpoint
from qload.cli import main
from qload.errors import ArgumentError
from qload.testing import assert_same_bits

SECTION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
CONFIG = {"model_type": "deepseek_v4", "expert_dtype": "fp4", "quantization_config": SECTION}
ROWS, COLUMNS = 16, 64
NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
    "mtp.0.enorm.weight": "mtp.0.enorm.weight",
}
NAMES_OF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_base": "ffn_hc.base",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
}
FP8_LAYERS = {
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
}
EXPERTS = {
    f"ffn.experts.{e}.{name}": f"mlp.experts.{e}.{name}" for e in (0, 1) for name in ("w1", "w2", "w3")
}
Renamed = dict[str, tuple[str, Tensor]]  # name in the source -> name in transformers, and the tensor


def plain_tensor(name: str) -> Tensor:
    if name.endswith("tid2eid"):
        return torch.arange(8).reshape(4, 2)
    vector = any(part in name for part in ("norm", "sink", "base", "scale", "bias"))
    values = torch.randn(ROWS) if vector else torch.randn(ROWS, COLUMNS)
    return values if "hc_" in name or "sink" in name else values.bfloat16()


def drawn(*, quantized: bool = True) -> Renamed:
    """Draw a model of one layer: MXFP4 experts, and other matrices in FP8 blocks or plain."""
    torch.manual_seed(0)
    tensors = {name: (new, plain_tensor(name)) for name, new in NAMES.items()}
    lead, new_lead = "layers.10.", "model.layers.10."
    tensors |= {lead + name: (new_lead + new, plain_tensor(name)) for name, new in NAMES_OF_LAYER.items()}
    for name, new in FP8_LAYERS.items():
        weight = torch.randn(ROWS, COLUMNS)
        tensors[f"{lead}{name}.weight"] = (
            f"{new_lead}{new}.weight",
            weight.to(torch.float8_e4m3fn) if quantized else weight.bfloat16(),
        )
        if quantized:
            scale = torch.randint(120, 130, (1, 1), dtype=torch.uint8).view(torch.float8_e8m0fnu)
            tensors[f"{lead}{name}.scale"] = f"{new_lead}{new}.weight_scale_inv", scale
    for name, new in EXPERTS.items():
        codes = torch.randint(-128, 128, (ROWS, COLUMNS // 2)).to(torch.int8)
        scales = torch.randint(120, 130, (ROWS, COLUMNS // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        tensors[f"{lead}{name}.weight"] = f"{new_lead}{new}.weight", codes
        tensors[f"{lead}{name}.scale"] = f"{new_lead}{new}.weight_scale_inv", scales
    return tensors


def written(folder: Path, tensors: Renamed, **config: Any) -> Path:
    folder.mkdir()
    save_file({name: tensor for name, (_, tensor) in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def test_tensors_get_the_names_of_transformers_and_keep_their_bytes(tmp_path: Path) -> None:
    tensors = drawn()
    source = written(tmp_path / "in", tensors)

    done = convert(source, tmp_path / "out", names="transformers")

    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert (done.verdict, set(done.counts), done.to) == ("ok", {"bits"}, "")
    assert done.notes == ["1 tensors of mtp.* keep their names; transformers ignores them"]
    assert stored.keys() == {new for new, _ in tensors.values()}
    for new, tensor in tensors.values():
        assert_same_bits(stored[new].view(torch.uint8), tensor.view(torch.uint8))
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    certificate = json.loads((tmp_path / "out" / "qload-certificate.json").read_text())
    assert (certificate["to"], certificate["names"]) == ("", "transformers")
    assert set(diff(tmp_path / "out", source).counts) == {"bits"}


def test_a_renamed_checkpoint_loads_and_its_layers_are_those_of_the_source(tmp_path: Path) -> None:
    source = written(tmp_path / "in", drawn())
    convert(source, tmp_path / "out", names="transformers")

    with open_checkpoint(source) as before, open_checkpoint(tmp_path / "out") as after:
        for name, new in (FP8_LAYERS | EXPERTS).items():
            want, got = (
                weights.get_weights(prefix)
                for weights, prefix in ((before, f"layers.10.{name}"), (after, f"model.layers.10.{new}"))
            )
            assert type(got) is type(want)
            assert_same_bits(got.dequantize(), want.dequantize())


def test_a_dequantized_checkpoint_has_the_names_too(tmp_path: Path) -> None:
    tensors = drawn()

    done = convert(written(tmp_path / "in", tensors), tmp_path / "out", to="bfloat16", names="transformers")

    assert (done.verdict, set(done.counts), done.to) == ("ok", {"bits"}, "bfloat16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == {new for new, _ in tensors.values() if not new.endswith("weight_scale_inv")}
    weight, scale = (tensors[f"layers.10.attn.wkv.{field}"][1].float() for field in ("weight", "scale"))
    assert torch.equal(stored["model.layers.10.self_attn.kv_proj.weight"].float(), weight * scale)


def test_a_config_names_layers_as_the_tensors_do(tmp_path: Path) -> None:
    source = written(tmp_path / "in", drawn(quantized=False))

    done = convert(source, tmp_path / "out", to="mxfp4", names="transformers")

    assert done.verdict == "ok"
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {f"model.layers.10.{new}" for new in FP8_LAYERS.values()} <= set(ignored)
    assert not [name for name in ignored if name.startswith("layers.")]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("layers.10.attn.wx.weight", "transformers has no name for layers.10.attn.wx.weight in a model of"),
        (
            "layers.10.attn.norm.weight",
            "its name in transformers is model.layers.10.self_attn.kv_norm.weight",
        ),
    ],
)
def test_a_tensor_without_a_name_of_its_own_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    source = written(tmp_path / "in", {**drawn(), name: ("", torch.ones(ROWS, COLUMNS).bfloat16())})

    found = convert(source, tmp_path / "out", names="transformers")

    assert [layer.outcome for layer in found.layers] == ["refused"]
    assert reason in found.layers[0].detail
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"model_type": "llama"}, {}, "a model of the type deepseek_v4"),
        ({"model_type": ["deepseek_v4"]}, {}, "a model of the type deepseek_v4"),
        (
            {"quantization_config": {**SECTION, "modules_to_not_convert": ["head"]}},
            {},
            "modules_to_not_convert in config.json",
        ),
        ({}, {"to": "gguf"}, "another target than gguf"),
        ({}, {"names": None}, "one of gptq"),
        ({}, {"names": "published"}, "'transformers'"),
    ],
)
def test_what_cannot_be_renamed_is_refused(
    config: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    source = written(tmp_path / "in", drawn(), **config)

    with pytest.raises(ArgumentError, match=words):
        convert(source, tmp_path / "out", **{"names": "transformers", **options})


def test_a_checkpoint_with_the_names_of_transformers_is_refused(tmp_path: Path) -> None:
    convert(written(tmp_path / "in", drawn()), tmp_path / "out", names="transformers")

    with pytest.raises(ArgumentError, match="only tensors with its names"):
        convert(tmp_path / "out", tmp_path / "again", names="transformers")


def test_the_command_renames_without_a_target_format(tmp_path: Path) -> None:
    source = written(tmp_path / "in", drawn())
    arguments = ["convert", str(source), "-o", str(tmp_path / "out")]

    missing = CliRunner().invoke(main, arguments)
    done = CliRunner().invoke(main, [*arguments, "--names", "transformers"])

    assert (missing.exit_code, done.exit_code) == (2, 0)
    assert "Missing option '--to' / '--names'" in missing.output
    assert (tmp_path / "out" / "model.safetensors").exists()
