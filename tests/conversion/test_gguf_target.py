"""GGUF as a target: blocks, names, order of rows and keys of llama.cpp, and refusals."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload import convert, open_checkpoint
from qload.architecture import architecture_of
from qload.architecture.architecture import Architecture
from qload.storage.gguf_header import GGUFHeader, read_gguf_header
from qload.testing import assert_same_bits

RANDOM = np.random.default_rng(0)
SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rope_theta": 5e5},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": True},
}
UP = "model.layers.0.mlp.up_proj"
EXPERT = re.compile(r"experts\.(\d+)\.")


def drawn(high: int, *shape: int, low: int = 0) -> NDArray[np.uint8]:
    return RANDOM.integers(low, high, shape).astype(np.uint8)


def integers(bits: int, N: int, K: int) -> dict[str, Tensor]:
    """Draw a layer of pack-quantized in groups of 32."""
    codes, scales = drawn(2**bits, N, K), RANDOM.standard_normal((N, K // 32)).astype(np.float16)
    words = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    return {
        "weight_packed": torch.from_numpy(words).view(torch.int32),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([N, K]),
    }


def mxfp4(N: int, K: int) -> dict[str, Tensor]:
    """Draw a layer of compressed-tensors without codes of -0."""
    codes = drawn(16, N, K)
    codes[codes == 8] = 0
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    return {"weight_packed": packed, "weight_scale": torch.from_numpy(drawn(250, N, K // 32))}


def nvfp4(N: int, K: int) -> dict[str, Tensor]:
    """Draw a layer of ModelOpt without codes of -0."""
    scales = torch.from_numpy(drawn(0x7F, N, K // 16)).view(torch.float8_e4m3fn)
    packed = mxfp4(N, K)["weight_packed"]
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor([0.25])}


def compressed_tensors(layout: str, **weights: object) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def of_integers(bits: int) -> dict[str, Any]:
    return compressed_tensors("pack-quantized", num_bits=bits, type="int", strategy="group", group_size=32)


FORMATS: Mapping[str, Any] = {  # type of ggml -> draw a layer, config, target of the way back
    "Q4_0": (lambda N, K: integers(4, N, K), of_integers(4), "compressed-tensors"),
    "Q8_0": (lambda N, K: integers(8, N, K), of_integers(8), "compressed-tensors"),
    "MXFP4": (
        mxfp4,
        compressed_tensors("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        "mxfp4",
    ),
    "NVFP4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "nvfp4_modelopt"),
}


def is_quantized(architecture: Architecture, name: str) -> bool:
    """Return whether a tensor is a matrix of a layer, except for routers."""
    shape = architecture.expected(name)
    return ".layers." in name and len(shape or ()) == 2 and not name.endswith(("mlp.gate", "moe.gate"))


def checkpoint(folder: Path, model: str, kind: str, **changes: object) -> Path:
    """Write a drawn model whose layers are in the format that becomes a type of ggml."""
    draw, section, _ = FORMATS[kind]
    config = {"model_type": model, **SIZES, **MODELS[model], **changes}
    architecture, tensors = architecture_of(config), {}
    assert architecture is not None
    for name in architecture.required():
        shape = architecture.shape(name) or architecture.expected(name)
        assert shape is not None
        if is_quantized(architecture, name):
            tensors |= {f"{name}.{field}": tensor for field, tensor in draw(*shape).items()}
        else:
            values = torch.from_numpy(RANDOM.standard_normal(shape).astype(np.float32)).bfloat16()
            tensors[name if name.endswith((".weight", ".bias")) else f"{name}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return folder


def changed(folder: Path, **tensors: Tensor) -> Path:
    """Change tensors of a checkpoint, by names with colons for dots."""
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
        ("mistral", "MXFP4"),
        ("qwen2", "Q8_0"),
        ("qwen3", "NVFP4"),
        ("mixtral", "Q4_0"),
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


@pytest.mark.parametrize(("model", "kind"), [("llama", "NVFP4"), ("mixtral", "MXFP4"), ("qwen3_moe", "Q8_0")])
def test_gguf_py_reads_the_same_values(model: str, kind: str, tmp_path: Path) -> None:
    """Test against the names and decoders of gguf-py, where it is installed."""
    gguf = pytest.importorskip("gguf")
    source = checkpoint(tmp_path / "in", model, kind)
    convert(source, tmp_path / "out", to="gguf")
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    architecture = "qwen3moe" if model == "qwen3_moe" else "llama"
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, 1)

    with open_checkpoint(source) as weights:
        stored = load_file(source / "model.safetensors")
        for prefix in (
            name.removesuffix(".weight_scale") for name in stored if name.endswith("weight_scale")
        ):
            stem, expert = names.get_name(re.sub(r"experts\.\d+", "experts", prefix)), EXPERT.search(prefix)
            tensor = read[f"{stem}.weight"]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
            if kind == "NVFP4":
                values *= read[f"{stem}.scale"].data.reshape(-1, *(1 for _ in values.shape[1:]))
            wanted = weights.get_weights(prefix).dequantize().numpy()
            if architecture == "llama" and stem.endswith(("attn_q", "attn_k")):
                heads = 4 if stem.endswith("attn_q") else 2
                wanted = wanted.reshape(heads, 2, -1, wanted.shape[1]).swapaxes(1, 2).reshape(wanted.shape)
            assert np.array_equal(values[int(expert[1])] if expert else values, wanted)


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

    assert "GGUF is written for the model types llama, mistral, mixtral" in reason


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
