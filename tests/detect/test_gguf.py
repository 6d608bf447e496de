"""Models in GGUF files: names, order of rows, experts and configs of converters; files of other kinds."""

import math
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qload.architecture.model_tables import TABLES
from qload.checkpoint import Checkpoint, open_checkpoint
from qload.detect.gguf import (
    ARCHITECTURES,
    LLAMA3_SCALING,
    MIXTRAL,
    ROPE_FACTORS,
    config_of_keys,
    name_tensors,
    scaling_of_factors,
)
from qload.errors import StorageError
from qload.models import Engine, load_model
from qload.models.config import text_config
from qload.models.rope import Rope, RopeConfig
from qload.storage import ArrayLength, GGUFEntry, TensorView
from qload.storage.gguf_types import GGML_TYPES
from qload.testing import assert_same_bits
from qload.verify import verify
from tests.paths import FIXTURES
from tests.storage.gguf_files import LLAMA, blocks, floats, gguf_file
from tests.storage.test_gguf import interleaved

pytestmark = pytest.mark.usefixtures("seen_texts")

GPT_OSS, GPT_OSS_ORIGINAL = FIXTURES / "gguf" / "gpt_oss_mxfp4", FIXTURES / "models" / "mxfp4_gpt_oss"
CONVERTED = ("llama_q8_0", "qwen2_q8_0", "mixtral_q8_0", "qwen3_moe_q8_0")
MATRIX = GGUFEntry(GGML_TYPES[8], (64, 64), 0, 0)


def named(
    architecture: str, *sources: str, shape: tuple[int, ...] = (64, 64), **keys: Any
) -> dict[str, TensorView]:
    stated = {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    entries = {source: GGUFEntry(GGML_TYPES[8], shape, 0, 0) for source in sources}
    return name_tensors({"general.architecture": architecture, **stated}, entries, "a.gguf")


@pytest.mark.parametrize("case", CONVERTED)
def test_a_converted_model_has_the_tensors_of_its_original(case: str) -> None:
    """Test float tensors bit for bit, and those of Q8_0 within half a step of their block."""
    source = load_file(FIXTURES / "gguf" / case / "expected" / "source.safetensors")
    with Checkpoint.open(FIXTURES / "gguf" / case) as checkpoint:
        stored = {
            *checkpoint.layers,
            *(name.removesuffix(".bias") for name in source if name.endswith(".bias")),
        }
        assert stored | {"lm_head"} == {name.rpartition(".")[0] for name in source} | {"lm_head"}
        for name, want in source.items():
            prefix, _, suffix = name.rpartition(".")
            if suffix == "bias":
                assert torch.equal(checkpoint.weights.get_tensor(name), want.float())
                continue
            weight = checkpoint.weights.get_weights(prefix)
            if weight.plain:
                assert_same_bits(weight.dequantize(), want.float())
                continue
            steps = weight.codes().scales.abs().repeat_interleave(32, 1)
            slack = steps * 2.0**-10 * 128  # the step was rounded to float16
            assert ((weight.dequantize() - want.float()).abs() <= steps / 2 + slack).all()


@pytest.mark.parametrize("case", CONVERTED)
def test_a_converted_model_gives_the_logits_of_plain_weights(case: str, tmp_path: Path) -> None:
    """Test against a folder of the dequantized weights under the names of the original."""
    folder = FIXTURES / "gguf" / case
    with Checkpoint.open(folder) as checkpoint:
        weights = checkpoint.weights
        plain = {
            f"{name}.weight": weights.get_weights(name).dequantize().clone() for name in checkpoint.layers
        }
        plain |= {name: weights.get_tensor(name) for name in checkpoint.names if name.endswith(".bias")}
        (tmp_path / "config.json").write_text(dumps(checkpoint.model_config))
    save_file(plain, tmp_path / "model.safetensors")
    logits = []
    for path in (folder, tmp_path):
        engine = Engine(load_model(path), max_tokens=16, page_size=16)
        with torch.no_grad():
            logits.append(engine.prefill([1, 5, 9, 3]))

    assert_same_bits(*logits)
    assert logits[0].std() > 0


@pytest.mark.parametrize("case", CONVERTED)
def test_a_converted_model_is_sound(case: str) -> None:
    report = verify(FIXTURES / "gguf" / case)

    assert (report.verdict, report.findings, report.notes) == ("ok", (), ())


def test_gpt_oss_has_the_values_and_the_config_of_its_original() -> None:
    """Test bit for bit, except that ggml has no -0, and that the file has no tokenizer and no dtype."""
    with Checkpoint.open(GPT_OSS) as file, Checkpoint.open(GPT_OSS_ORIGINAL) as original:
        assert file.layers.keys() == original.layers.keys()
        for name in original.layers:
            want = original.weights.get_weights(name).dequantize().float()
            assert_same_bits(file.weights.get_weights(name).dequantize(), want + 0.0)
        others = [name for name in original.names if name.endswith((".bias", ".sinks"))]
        assert others == [name for name in file.names if name.endswith((".bias", ".sinks"))] != []
        for name in others:
            assert_same_bits(file.weights.get_tensor(name), original.weights.get_tensor(name).float())
        configs = [text_config(each.model_config) for each in (file, original)]
    read, wanted = ({**vars(config), "architecture": None, "eos": (), "dtype": None} for config in configs)
    eps = np.float32(wanted["eps"])
    assert read == {**wanted, "eps": float(eps)}


def test_gpt_oss_gives_the_logits_of_its_original() -> None:
    logits = []
    for path in (GPT_OSS, GPT_OSS_ORIGINAL):
        engine = Engine(load_model(path, dtype=torch.float32), max_tokens=32, page_size=16)
        with torch.no_grad():
            logits.append(engine.prefill([*range(1, 24)]))

    assert_same_bits(*logits)
    assert verify(GPT_OSS).findings == ()


def test_gpt_oss_without_a_scaling_does_not_get_the_one_of_its_type() -> None:
    with Checkpoint.open(GPT_OSS) as checkpoint:
        keys = {"general.architecture": "gpt-oss", "gpt-oss.rope.freq_base": 1e4}
        config = {**checkpoint.model_config, **config_of_keys(keys, {})}

    assert text_config(config).rope.type == "default"


def test_rows_of_queries_and_keys_of_llama_are_in_the_order_of_transformers(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": floats(interleaved(rows, 4)),
        "blk.0.attn_k.weight": floats(interleaved(rows[:128], 2)),
        "blk.0.attn_v.weight": floats(rows[:128]),
        "blk.0.attn_q.bias": floats(interleaved(rows[:, 0], 4)),
    }
    (tmp_path / "a.gguf").write_bytes(gguf_file(LLAMA, tensors))

    with open_checkpoint(tmp_path) as weights:
        for name, want in (("q", rows), ("k", rows[:128]), ("v", rows[:128])):
            got = weights.get_weights(f"model.layers.0.self_attn.{name}_proj").dequantize()
            assert torch.equal(got, torch.from_numpy(want))
        assert torch.equal(
            weights.get_tensor("model.layers.0.self_attn.q_proj.bias"), torch.from_numpy(rows[:, 0].copy())
        )


@pytest.mark.parametrize(
    ("architecture", "source", "name", "change"),
    [
        ("qwen3", "blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj", 0),
        ("gemma2", "blk.0.post_ffw_norm.weight", "model.layers.0.post_feedforward_layernorm", 1),
        ("gemma", "output_norm.weight", "model.norm", 1),
    ],
)
def test_values_of_other_architectures(
    tmp_path: Path, architecture: str, source: str, name: str, change: float
) -> None:
    values = np.arange(64 if change else 64 * 4, dtype=np.float32).reshape((64,) if change else (64, 4))
    keys = {"general.architecture": architecture, f"{architecture}.attention.head_count_kv": 4}
    (tmp_path / "a.gguf").write_bytes(gguf_file(keys, {source: floats(values + change)}))

    with open_checkpoint(tmp_path) as weights:
        assert torch.equal(weights.get_weights(name).dequantize(), torch.from_numpy(values))


@pytest.mark.parametrize("fused", [False, True])
def test_values_of_experts(tmp_path: Path, fused: bool) -> None:
    gate, up = np.arange(2 * 2 * 6 * 4, dtype=np.float32).reshape(2, 2, 6, 4)
    keys = {"general.architecture": "qwen3moe" if fused else "llama", "llama.expert_count": 2}
    both = {"blk.0.ffn_gate_up_exps.weight": floats(np.concatenate([gate, up], 1))}
    apart = {"blk.0.ffn_gate_exps.weight": floats(gate), "blk.0.ffn_up_exps.weight": floats(up)}
    (tmp_path / "a.gguf").write_bytes(gguf_file(keys, both if fused else apart))
    lead, names = ("mlp", ("gate_proj", "up_proj")) if fused else ("block_sparse_moe", ("w1", "w3"))

    with open_checkpoint(tmp_path) as weights:
        for expert in range(2):
            for name, want in zip(names, (gate, up), strict=True):
                got = weights.get_weights(f"model.layers.0.{lead}.experts.{expert}.{name}").dequantize()
                assert torch.equal(got, torch.from_numpy(want[expert]))


def test_packed_rows_move_as_they_are(tmp_path: Path) -> None:
    kind, shape, content = blocks("Q6_K", (256, 256))
    packed = np.frombuffer(content, np.uint8).reshape(256, 210)
    stored = interleaved(packed, 4).tobytes()
    (tmp_path / "a.gguf").write_bytes(gguf_file(LLAMA, {"blk.0.attn_q.weight": (kind, shape, stored)}))

    with open_checkpoint(tmp_path, nonfinite="allow") as weights:
        weight = weights.get_weights("model.layers.0.self_attn.q_proj")
    assert weight.fields()["blocks"].numpy().tobytes() == content


@pytest.mark.parametrize(
    "architecture", ["qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3", "gpt-oss"]
)
def test_other_architectures_keep_the_order_of_rows(architecture: str) -> None:
    views = named(architecture, "blk.3.attn_q.weight", attention__head_count=4)

    assert views == {"model.layers.3.self_attn.q_proj.weight": TensorView("blk.3.attn_q.weight")}


def test_heads_of_keys_may_differ_by_layer() -> None:
    heads = {"attention__head_count": 8, "attention__head_count_kv": [2, 4]}
    views = named("llama", "blk.0.attn_k.weight", "blk.1.attn_k.weight", "blk.1.attn_q.weight", **heads)

    assert [view.heads for view in views.values()] == [2, 4, 8]


@pytest.mark.parametrize("heads", [0, 5, 64, -1, "x", [4], None])
def test_rows_that_heads_do_not_divide_keep_the_names_of_the_file(heads: Any) -> None:
    views = named("llama", "blk.1.attn_q.weight", attention__head_count=heads)
    moved = {"model.layers.1.self_attn.q_proj.weight": TensorView("blk.1.attn_q.weight")}

    assert views in ({"blk.1.attn_q.weight": TensorView("blk.1.attn_q.weight")}, moved)


@pytest.mark.parametrize(
    "shift", ["attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm"]
)
def test_norms_of_gemma_lose_the_one_that_was_added(shift: str) -> None:
    (view,) = named("gemma3", f"blk.0.{shift}.weight", shape=(64,)).values()

    assert view.shift == 1


def test_experts_of_a_stack_have_names_of_their_own() -> None:
    views = named(
        "llama", "blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_inp.weight", shape=(2, 64, 64), expert_count=2
    )

    assert views == {
        "model.layers.0.block_sparse_moe.experts.0.w1.weight": TensorView(
            "blk.0.ffn_gate_exps.weight", index=0
        ),
        "model.layers.0.block_sparse_moe.experts.1.w1.weight": TensorView(
            "blk.0.ffn_gate_exps.weight", index=1
        ),
        "model.layers.0.block_sparse_moe.gate.weight": TensorView("blk.0.ffn_gate_inp.weight"),
    }


@pytest.mark.parametrize("suffix", ["weight", "bias"])
def test_fused_gate_and_up_of_experts_are_told_apart(suffix: str) -> None:
    views = named("qwen3moe", f"blk.0.ffn_gate_up_exps.{suffix}", shape=(1, 64, 64))
    lead = "model.layers.0.mlp.experts.0"

    assert {name: view.part for name, view in views.items()} == {
        f"{lead}.gate_proj.{suffix}": (0, 2),
        f"{lead}.up_proj.{suffix}": (1, 2),
    }


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mixtral"])
def test_names_are_those_of_the_architecture(architecture: str) -> None:
    """Test against the tables, and against gguf-py's own map where it is installed."""
    known = MIXTRAL if architecture == "mixtral" else ARCHITECTURES[architecture]
    lead, more = ("llama", {"expert_count": 2}) if architecture == "mixtral" else (architecture, {})
    table = TABLES[known.model_type]
    rows = [row.name for row in table.rows if not row.optional]
    prefixes = {row.replace("{layer}", "0").replace("{expert}", "0").removesuffix(".weight") for row in rows}
    stems = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down", "attn_norm", "ffn_norm")
    sources = [f"blk.0.{stem}.weight" for stem in stems if not (lead == "phi3" and stem in stems[:3])]
    if known.model_type in ("mixtral", "qwen3_moe", "gpt_oss"):
        sources.remove("blk.0.ffn_down.weight")
    sources += ["token_embd.weight", "output_norm.weight"]
    sources += [f"blk.0.{stem}" for stem in known.tensors]

    for source in sources:
        (name,) = named(lead, source, **more)
        assert name.removesuffix(".weight") in prefixes, source


@pytest.mark.parametrize(
    "source", ["rope_freqs.weight", "blk.0.attn_q", "blk.x.attn_q.weight", "blk.0.ssm_a", "v.blk.0.a.weight"]
)
def test_unknown_tensors_keep_their_names(source: str) -> None:
    assert named("qwen3", source) == {source: TensorView(source)}


@pytest.mark.parametrize("turned", [False, True])
def test_two_tensors_of_one_name_are_refused(turned: bool) -> None:
    sources = ["output_norm.weight", "model.norm.weight"]

    with pytest.raises(StorageError, match=r"is model\.norm\.weight of the model, and so is") as caught:
        named("qwen3", *(reversed(sources) if turned else sources), shape=(64,))
    assert caught.value.rule == "duplicate-tensor"


def test_an_unknown_architecture_keeps_names_and_is_named(tmp_path: Path) -> None:
    keys = {**LLAMA, "general.architecture": "falcon"}
    tensors = {
        "blk.0.attn_q.weight": blocks("Q4_0", (4, 64)),
        "blk.0.ffn_up_exps.weight": floats(np.ones((2, 3, 4))),
    }
    (tmp_path / "a.gguf").write_bytes(gguf_file(keys, tensors))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert {*checkpoint.layers} == {"blk.0.attn_q", "blk.0.ffn_up_exps.0", "blk.0.ffn_up_exps.1"}
        assert "general.architecture is 'falcon'" in checkpoint.notes[0]


def test_a_config_has_the_keys_of_transformers() -> None:
    keys = {
        **LLAMA,
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 500000.0,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.feed_forward_length": [512],
        "tokenizer.ggml.eos_token_id": 2,
    }

    assert config_of_keys(keys, {"token_embd.weight": MATRIX}) == {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 128,
        "vocab_size": 64,
        "head_dim": 64,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ({"feed_forward_length": [8, 8]}, {"intermediate_size": 8}),
        ({"feed_forward_length": [8, 4]}, {"intermediate_size": [8, 4]}),
        ({"feed_forward_length": ArrayLength(70000)}, {"intermediate_size": [70000]}),
        ({"vocab_size": 99}, {"vocab_size": 99}),
        ({"rope.dimension_count": 32}, {"head_dim": 32}),
        ({"rope.dimension_count": True}, {}),
        ({"rope.dimension_count": 32, "attention.key_length": 32}, {"head_dim": 32}),
        (
            {"rope.dimension_count": 32, "attention.key_length": 64},
            {"head_dim": 64, "partial_rotary_factor": 0.5},
        ),
        ({"rope.dimension_count": 32, "attention.key_length": 0}, {"head_dim": 0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, {}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 64},
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
            {"rope_scaling": {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0}},
        ),
        (
            {"expert_count": 8, "expert_used_count": 2},
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
        ),
    ],
    ids=str,
)
def test_keys_of_a_file_change_those_of_its_config_alone(
    keys: dict[str, Any], changes: dict[str, Any]
) -> None:
    tensors = {"token_embd.weight": MATRIX}
    usual = config_of_keys(LLAMA, tensors)
    added = {f"llama.{key}": value for key, value in keys.items()}

    assert config_of_keys({**LLAMA, **added}, tensors) == {**usual, **changes}


def test_experts_of_other_types_have_another_key_and_their_heads_rotate_whole() -> None:
    keys = {
        "general.architecture": "qwen3moe",
        "qwen3moe.expert_count": 4,
        "qwen3moe.rope.dimension_count": 32,
    }

    config = config_of_keys(keys, {"output.weight": MATRIX})

    assert (config["num_experts"], config["tie_word_embeddings"]) == (4, False)
    assert {"num_local_experts", "head_dim", "vocab_size"}.isdisjoint(config)


def test_an_unknown_architecture_is_the_type_of_the_model() -> None:
    assert config_of_keys({"general.architecture": "x" * 100}, {}) == {"model_type": f"GGUF's {'x' * 80}"}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_follows_from_its_factors(factor: float) -> None:
    """Test against the frequencies of a rope with that scaling."""
    config: dict[str, Any] = {"rope_theta": 500000.0}
    scaled = RopeConfig(
        "llama3", 500000.0, 128, factor=factor, original=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    plain = RopeConfig("default", 500000.0, 128)
    factors = (Rope(plain).frequencies.double() / Rope(scaled).frequencies.double()).float().numpy()

    scaling = scaling_of_factors(factors, config)
    assert scaling == {"rope_type": "llama3", "factor": pytest.approx(factor), **LLAMA3_SCALING}
    assert scaling_of_factors(factors * 1.01, config) == {"rope_type": ROPE_FACTORS}
    assert scaling_of_factors(factors[:-1], config) == {"rope_type": ROPE_FACTORS}


@pytest.mark.parametrize(
    ("factors", "config", "kind"),
    [
        ([1.0, 1.0], {"rope_theta": 1.5}, "llama3"),
        ([1.0, 1.0], {"rope_theta": 1.0}, ROPE_FACTORS),
        ([1.0, 1.0], {"rope_theta": 10000}, ROPE_FACTORS),
        ([1.0, 1.0], {}, ROPE_FACTORS),
        ([], {"rope_theta": 1.5}, ROPE_FACTORS),
        ([1.0, math.inf], {"rope_theta": 1.5}, ROPE_FACTORS),
        ([1.0, math.nan], {"rope_theta": 1.5}, ROPE_FACTORS),
    ],
)
def test_a_scaling_of_llama_3_needs_factors_and_a_base_above_1(
    factors: list[float], config: dict[str, Any], kind: str
) -> None:
    assert scaling_of_factors(np.array(factors, np.float32), config)["rope_type"] == kind


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general.architecture": "clip"}, "the vision or audio part of a model"),
        ({"general.architecture": "llama", "general.type": "mmproj"}, "the vision or audio part of a model"),
        ({"general.type": "imatrix"}, "an importance matrix"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "a LoRA adapter"),
    ],
)
def test_files_of_other_things_than_models_are_refused_by_name(
    tmp_path: Path, keys: dict[str, str], words: str
) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf_file(keys, {"a.weight": floats(np.ones((2, 2)))}))

    with pytest.raises(StorageError, match=words) as caught:
        open_checkpoint(tmp_path)
    assert (caught.value.rule, bool(caught.value.remedy)) == ("unsupported-format", True)
    assert verify(tmp_path).verdict == "unsupported"
