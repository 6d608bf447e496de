"""GGUF as a target: blocks, names, order of rows and keys of llama.cpp, and refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload import convert, open_checkpoint
from qload.storage.gguf_header import GGUFHeader, read_gguf_header
from qload.testing import assert_same_bits
from tests.conversion.drawn_models import FORMATS, checkpoint, integers, of_integers
from tests.paths import FIXTURES

pytestmark = pytest.mark.usefixtures("seen_texts")

UP = "model.layers.0.mlp.up_proj"


def changed(folder: Path, **tensors: Tensor) -> Path:
    """Change tensors of a checkpoint."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})
    return folder


def header_of(folder: Path) -> GGUFHeader:
    return read_gguf_header(folder / "model.gguf", "model.gguf")


def reasons(source: Path, **options: Any) -> set[str]:
    """Return the reasons of a refusal."""
    found = convert(source, source.parent / "refused", to="gguf", **options)

    assert found.verdict == "findings"
    assert not (source.parent / "refused").exists()
    return {layer.detail for layer in found.layers}


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("llama", "Q4_0"),
        ("qwen2", "Q8_0"),
        ("mixtral", "MXFP4"),
        ("qwen3_moe", "NVFP4"),
    ],
)
def test_a_model_comes_back_bit_for_bit(model: str, kind: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", model, kind)

    done = convert(source, tmp_path / "gguf", to="gguf")
    back = convert(tmp_path / "gguf", tmp_path / "back", to=FORMATS[kind][2])

    assert (done.verdict, set(done.counts)) == (back.verdict, set(back.counts)) == ("ok", {"bits"})
    assert sorted(file.name for file in (tmp_path / "gguf").iterdir()) == [
        "model.gguf",
        "qload-certificate.json",
    ]
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        plain = tensor.dtype == torch.bfloat16
        assert_same_bits(after[name].float() if plain else after[name], tensor.float() if plain else tensor)


def test_rows_of_a_head_have_the_order_of_llama_cpp(tmp_path: Path) -> None:
    """Decode the bytes of the file by the formula of Q4_0, and compare with llama.cpp's permutation."""
    source = checkpoint(tmp_path / "in", "llama", "Q4_0")
    convert(source, tmp_path / "out", to="gguf")
    content = (tmp_path / "out" / "model.gguf").read_bytes()

    def decode(name: str) -> NDArray[np.float32]:
        entry = header_of(tmp_path / "out").tensors[name]
        blocks = np.frombuffer(content[entry.begin : entry.end], np.uint8).reshape(-1, 18)
        scales, halves = blocks[:, :2].copy().view(np.float16).astype(np.float32), blocks[:, 2:]
        codes = np.concatenate([halves & 15, halves >> 4], 1).astype(np.float32) - 8
        return (codes * scales).reshape(entry.shape)

    stored = load_file(source / "model.safetensors")
    for stem, part, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2), ("attn_v", "v_proj", 0)):
        packed = stored[f"model.layers.0.self_attn.{part}.weight_packed"].view(torch.uint8).numpy()
        scales = stored[f"model.layers.0.self_attn.{part}.weight_scale"].numpy().astype(np.float32)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1, 32).astype(np.float32) - 8
        rows = (codes * scales[..., None]).reshape(len(packed), -1)
        if heads:
            rows = rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)
        assert np.array_equal(decode(f"blk.0.{stem}.weight"), rows)


def test_gpt_oss_has_the_bytes_of_llama_cpp(tmp_path: Path) -> None:
    """Test tensors and keys against the file of llama.cpp's converter.

    llama.cpp reads no ends of YaRN's ramp for this type, so that other ends than its own are refused.
    """
    source, out = FIXTURES / "models" / "mxfp4_gpt_oss", tmp_path / "out"

    done = convert(source, out, to="gguf", rounding=True)

    contents, headers = [], []
    for folder in (FIXTURES / "gguf" / "gpt_oss_mxfp4", out):
        header, content = header_of(folder), (folder / "model.gguf").read_bytes()
        headers.append(header)
        contents.append(
            {
                name: (entry.type.name, entry.shape, content[entry.begin : entry.end])
                for name, entry in header.tensors.items()
            }
        )
    theirs, ours = contents
    assert done.verdict == "ok"
    assert ours == theirs
    keys = {
        key: value
        for key, value in headers[0].keys.items()
        if key.startswith("gpt-oss.") and "beta" not in key
    }
    added = {"gpt-oss.vocab_size": 96, "gpt-oss.rope.dimension_count": 16}
    assert {key: value for key, value in headers[1].keys.items() if key in {**keys, **added}} == keys | added


def test_gpt_oss_without_negative_zeros_comes_back_bit_for_bit(tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(FIXTURES / "models" / "mxfp4_gpt_oss", source, ignore=shutil.ignore_patterns("expected"))
    stored = load_file(source / "model.safetensors")
    blocks = {name: tensor for name, tensor in stored.items() if name.endswith("_blocks")}
    for tensor in blocks.values():
        tensor.bitwise_or_(0x11)  # no code is even, so that none is 8
    changed(source, **blocks)

    done = convert(source, tmp_path / "gguf", to="gguf")
    back = convert(tmp_path / "gguf", tmp_path / "back", to="mxfp4_gpt_oss")

    assert (set(done.counts), set(back.counts)) == ({"bits"}, {"bits"})
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        plain = tensor.dtype == torch.bfloat16
        assert_same_bits(after[name].float() if plain else after[name], tensor.float() if plain else tensor)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"layer_types": ["full_attention"] * 2}, "states its masks"),
        ({"swiglu_limit": 5.0}, "states its facts"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": True}}, "states its rope"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0}}, "its rope"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0}}, "states its rope"),
    ],
)
def test_a_setting_of_gpt_oss_without_a_key_is_refused(
    values: dict[str, object], reason: str, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    shutil.copytree(FIXTURES / "models" / "mxfp4_gpt_oss", source, ignore=shutil.ignore_patterns("expected"))

    assert all(reason in each for each in reasons(changed_config(source, **values), rounding=True))


def test_keys_and_types_are_those_of_llama_cpp(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "qwen3_moe", "NVFP4", eos_token_id=3)

    convert(source, tmp_path / "out", to="gguf")

    header = header_of(tmp_path / "out")
    assert dict(header.keys) == {
        "general.architecture": "qwen3moe",
        "general.type": "model",
        "general.quantization_version": 2,
        "qwen3moe.block_count": 1,
        "qwen3moe.context_length": 64,
        "qwen3moe.embedding_length": 64,
        "qwen3moe.feed_forward_length": 128,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.attention.key_length": 16,
        "qwen3moe.attention.value_length": 16,
        "qwen3moe.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
        "qwen3moe.rope.freq_base": 10000.0,
        "qwen3moe.rope.dimension_count": 16,
        "qwen3moe.vocab_size": 8,
        "qwen3moe.expert_count": 3,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": 64,
        "tokenizer.ggml.model": "none",
        "tokenizer.ggml.eos_token_id": 3,
    }
    types = {name: (entry.type.name, entry.shape) for name, entry in header.tensors.items()}
    assert types["blk.0.ffn_down_exps.weight"] == ("NVFP4", (3, 64, 64))
    assert types["blk.0.ffn_down_exps.scale"] == ("F32", (3,))
    assert types["blk.0.attn_q.scale"] == ("F32", (1,))
    assert types["blk.0.ffn_gate_inp.weight"] == ("F32", (3, 64))
    assert types["blk.0.attn_norm.weight"] == ("F32", (64,))
    assert types["token_embd.weight"] == ("BF16", (8, 64))


def test_llama_3_has_divisors_of_its_frequencies(tmp_path: Path) -> None:
    """Test against the loop of llama.cpp's converter."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    source = checkpoint(tmp_path / "in", "llama", "Q8_0", rope_scaling=scaling, rope_theta=5e5)

    convert(source, tmp_path / "out", to="gguf")

    factors = []
    for frequency in 1.0 / 5e5 ** (np.arange(0, 16, 2) / 16):
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - 1) / 3
        factors.append(
            1.0 if wavelength < 2048 else 8.0 if wavelength > 8192 else 1 / ((1 - smooth) / 8 + smooth)
        )
    entry = header_of(tmp_path / "out").tensors["rope_freqs.weight"]
    content = (tmp_path / "out" / "model.gguf").read_bytes()[entry.begin : entry.end]
    stored = np.frombuffer(content, np.float32)
    assert len({*factors}) > 2
    assert np.array_equal(stored, np.array(factors, np.float32))
    refused = reasons(changed_config(source, rope_scaling={**scaling, "low_freq_factor": 2.0}))
    assert all("states its rope" in reason for reason in refused)


def changed_config(folder: Path, **values: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


@pytest.mark.parametrize(
    ("model", "values", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "states its activation"),
        ("mistral", {"sliding_window": 16}, "states its masks"),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "states its rope",
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, "states its routing"),
        ("qwen3_moe", {"intermediate_size": 1 << 32}, "feed_forward_length is 4294967296, and this key"),
    ],
)
def test_a_setting_without_a_key_is_refused(
    model: str, values: dict[str, object], reason: str, tmp_path: Path
) -> None:
    source = checkpoint(tmp_path / "in", model, "Q8_0", **values)

    assert all(reason in each for each in reasons(source))


def test_other_models_are_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "llama", "Q8_0")

    (reason,) = reasons(changed_config(source, model_type="phi3"))

    assert "GGUF is written for the model types gpt_oss, llama, mistral, mixtral" in reason


def test_negative_zero_is_refused_and_rounded_on_request(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "llama", "MXFP4")
    codes = load_file(source / "model.safetensors")[f"{UP}.weight_packed"]
    codes[:] = 0x11
    codes[3, 5] = 0x81
    changed(source, **{f"{UP}.weight_packed": codes})

    (reason,) = reasons(source)
    done = convert(source, tmp_path / "out", to="gguf", rounding=True)

    assert "the value of output 3 and input 11 is -0, which ggml reads as 0" in reason
    assert done.verdict == "ok"
    assert {layer.name for layer in done.layers if layer.outcome == "rounded"} == {UP}
    with open_checkpoint(tmp_path / "out") as weights:
        assert weights.get_weights(UP).dequantize()[3, 11].item() == 0


def test_an_exponent_of_nan_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "llama", "MXFP4")
    exponents = load_file(source / "model.safetensors")[f"{UP}.weight_scale"]
    exponents[2, 1] = 255
    changed(source, **{f"{UP}.weight_scale": exponents})

    (reason,) = reasons(source, nonfinite="allow")

    assert "NaN: the first, of output 2 and group 1" in reason


def test_products_that_ggml_rounds_in_another_way_are_refused(tmp_path: Path) -> None:
    """ModelOpt rounds a scale times the second scale, and ggml a code times a scale times the second one."""
    source = checkpoint(tmp_path / "in", "llama", "NVFP4")
    changed(source, **{f"{UP}.weight_scale_2": torch.tensor([0.011])})
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    second = torch.tensor([0.011])

    (reason,) = reasons(source)

    assert bool((scales * second * 1.5 != scales * 1.5 * second).any())
    assert "no second scale of gguf gives the products of output" in reason


def test_integers_that_blocks_do_not_have_are_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "llama", "Q4_0")
    scales = load_file(source / "model.safetensors")[f"{UP}.weight_scale"].float()
    scales[3, 1] = 1e5
    changed(source, **{f"{UP}.weight_scale": scales})

    (reason,) = reasons(source)

    assert "the scale of output 3 and group 1, 100000, is not a float16" in reason


def test_experts_of_a_matrix_have_one_type(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "mixtral", "Q4_0")
    name = "model.layers.0.block_sparse_moe.experts.1.w1"
    section = of_integers(4)
    other = {**section["config_groups"]["group_0"]["weights"], "num_bits": 8}
    section["config_groups"]["group_1"] = {"targets": [name], "weights": other}
    changed(source, **{f"{name}.{field}": tensor for field, tensor in integers(8, 128, 64).items()})

    (reason,) = reasons(changed_config(source, quantization_config=section))

    assert "blk.0.ffn_gate_exps.weight has one type and shape for all experts" in reason


def test_a_tensor_without_a_name_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "llama", "Q4_0")
    changed(source, **{"model.layers.0.self_attn.gate.weight": torch.zeros(4, 64).bfloat16()})

    (reason,) = reasons(source)

    assert "llama.cpp has no name for model.layers.0.self_attn.gate.weight" in reason


def test_a_kept_layer_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "llama", "Q4_0")

    assert reasons(source, keep=["*.q_proj"]) == {
        "it is kept unchanged, and a GGUF file has quantized layers in blocks of ggml alone"
    }


def test_a_large_model_is_split(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", "qwen2", "Q8_0")

    done = convert(source, tmp_path / "out", to="gguf", shard_size=30_000)

    files = sorted((tmp_path / "out").glob("*.gguf"))
    headers = [read_gguf_header(file, file.name) for file in files]
    assert done.verdict == "ok"
    assert len(files) > 1
    assert [header.keys["split.no"] for header in headers] == [*range(len(files))]
    assert {header.keys["split.count"] for header in headers} == {len(files)}
    assert {header.keys["split.tensors.count"] for header in headers} == {
        sum(len(header.tensors) for header in headers)
    }
    assert "qwen2.block_count" not in headers[1].keys
