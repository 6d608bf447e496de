"""What `verify` finds by the architecture of a model, and where it keeps quiet."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import architecture_of
from qload.verify import inspect, verify
from tests.verify.checkpoints import GPTQ, gptq, model, rules

pytestmark = pytest.mark.usefixtures("seen_texts")

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
}


def whole(**config: Any) -> dict[str, Tensor]:
    """All tensors of a plain model, which are all different."""
    architecture = architecture_of({**CONFIG, **config})
    assert architecture is not None
    torch.manual_seed(0)
    tensors = {}
    for name in architecture.required():
        matrix = architecture.expected(name)
        shape = matrix or architecture.shape(name)
        assert shape is not None
        tensors[f"{name}.weight" if matrix else name] = torch.randn(shape)
    return tensors


def test_a_sound_model_is_sound(tmp_path: Path) -> None:
    report = verify(model(tmp_path, whole(), **CONFIG))

    assert (report.findings, report.notes) == ((), ())
    assert all(layer.expected == layer.shape for layer in report.layers if len(layer.shape) == 2)


def damaged(kind: str) -> dict[str, Tensor]:
    tensors = whole()
    attention, up = "model.layers.{}.self_attn.{}_proj.weight", "model.layers.0.mlp.up_proj.weight"
    if kind == "q holds k":
        tensors[attention.format(1, "q")] = -tensors[attention.format(1, "k")]  # of another layer
    elif kind == "lost outputs":
        tensors[up] = tensors[up][:-1]
    elif kind == "a transposed matrix":
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors[
            "model.layers.0.mlp.up_proj.weight"
        ].T.contiguous()
    elif kind == "another vocabulary":
        tensors["model.embed_tokens.weight"] = torch.randn(22, 16)
    elif kind == "a short embedding":
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-4]
    elif kind == "a long norm":
        tensors["model.norm.weight"] = torch.randn(17)
    elif kind == "every q":
        tensors = {name: tensor for name, tensor in tensors.items() if "q_proj" not in name}
    elif kind in ("lm_head", "model.norm", "model.embed_tokens"):
        del tensors[f"{kind}.weight"]
    elif kind == "a layer":
        tensors = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    elif kind == "every layer":
        tensors = {name: tensor for name, tensor in tensors.items() if "layers." not in name}
    return tensors


@pytest.mark.parametrize(
    ("kind", "rule", "tensor"),
    [
        ("q holds k", "architecture-shape", "model.layers.1.self_attn.q_proj"),
        ("lost outputs", "architecture-shape", "model.layers.0.mlp.up_proj"),
        ("a transposed matrix", "architecture-shape", "model.layers.0.mlp.up_proj"),
        ("another vocabulary", "architecture-shape", "model.embed_tokens"),
        ("a short embedding", "architecture-shape", "model.embed_tokens"),
        ("a long norm", "architecture-shape", "model.norm.weight"),
        ("every q", "architecture-missing", "model.layers.0.self_attn.q_proj"),
        ("lm_head", "architecture-missing", "lm_head"),
        ("model.norm", "architecture-missing", "model.norm.weight"),
        ("model.embed_tokens", "architecture-missing", "model.embed_tokens"),
        ("a layer", "layer-count", "model.layers.1"),
        ("every layer", "layer-count", "model.layers.0"),
    ],
)
def test_damage_is_found_once_and_named(kind: str, rule: str, tensor: str, tmp_path: Path) -> None:
    report = verify(model(tmp_path, damaged(kind), **CONFIG))

    assert [(finding.rule, finding.tensor) for finding in report.findings] == [(rule, tensor)]


def test_messages_have_both_shapes_and_the_words_of_the_config(tmp_path: Path) -> None:
    (finding,) = inspect(model(tmp_path, damaged("q holds k"), **CONFIG)).findings

    assert finding.message == (
        "model.layers.1.self_attn.q_proj: (N, K) is (8, 16), config.json says (16, 16) "
        "(num_attention_heads * head_dim, hidden_size)"
    )


ONE = {"num_hidden_layers": 1}
EXPERTS = {**ONE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "lost", "lacks"),
    [
        (ONE, [".q_proj."], "self_attn.q_proj: not stored"),
        ({}, [".q_proj."], "self_attn.q_proj: not stored, in 3 of 3 layers: 0, 1, 2"),
        (EXPERTS, [".2."], "block_sparse_moe.experts.2: not stored"),
        (
            EXPERTS,
            [".2.", ".3."],
            "block_sparse_moe.experts.2: not stored, and 2 experts are missing in all: 2, 3",
        ),
    ],
)
def test_a_message_says_of_how_many_layers_or_experts_something_lacks(
    config: dict[str, Any], lost: list[str], lacks: str, tmp_path: Path
) -> None:
    tensors = {
        name: tensor for name, tensor in whole(**config).items() if not any(part in name for part in lost)
    }

    (finding,) = verify(model(tmp_path, tensors, **{**CONFIG, **config})).findings

    assert finding.message.startswith(f"model.layers.0.{lacks}; config.json says ")


def test_a_config_of_another_width_is_one_finding_for_each_matrix(tmp_path: Path) -> None:
    report = verify(model(tmp_path, whole(), **{**CONFIG, "num_attention_heads": 8, "head_dim": 4}))

    assert [finding.tensor for finding in report.findings] == [
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.self_attn.q_proj",
    ]
    assert report.findings[0].message.endswith("; 2 more differ, up to model.layers.2.self_attn.o_proj")


def test_vocabularies_may_be_padded(tmp_path: Path) -> None:
    tensors = whole()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(32, 16)

    assert verify(model(tmp_path, tensors, **CONFIG)).findings == ()


def test_fewer_layers_declared_than_stored_is_a_warning(tmp_path: Path) -> None:
    (finding,) = verify(model(tmp_path, whole(), **{**CONFIG, "num_hidden_layers": 2})).findings

    assert (finding.rule, finding.severity, finding.tensor) == ("layer-count", "warning", "model.layers.2")


def test_a_huge_count_of_layers_is_one_finding(tmp_path: Path) -> None:
    (finding,) = verify(model(tmp_path, whole(), **{**CONFIG, "num_hidden_layers": 10**18})).findings

    assert finding.message.startswith("num_hidden_layers is 1000000000000000000, and 999999999999999997 of")


@pytest.mark.parametrize(
    ("head", "tied", "found"),
    [
        pytest.param("equal", True, set(), id="equal"),
        pytest.param("other", True, {"tied-head"}, id="other values"),
        pytest.param("longer", True, {"tied-head"}, id="another shape"),
        pytest.param("none", True, set(), id="none"),
        pytest.param("other", False, set(), id="not tied"),
    ],
)
def test_a_tied_head_is_the_embedding(head: str, tied: bool, found: set[str], tmp_path: Path) -> None:
    tensors = whole()
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = {
        "equal": embedding.clone(),
        "other": embedding + torch.eye(20, 16),
        "longer": torch.randn(24, 16),
        "none": embedding,
    }[head]
    if head == "none":
        del tensors["lm_head.weight"]

    report = verify(model(tmp_path, tensors, **CONFIG, tie_word_embeddings=tied))

    assert rules(report) == found
    assert all(finding.severity == "warning" for finding in report.findings)


@pytest.mark.parametrize(("said", "found"), [(False, {"quantized-head"}), (True, set()), (None, set())])
def test_a_quantized_head_may_not_be_denied(said: bool | None, found: set[str], tmp_path: Path) -> None:
    section = GPTQ if said is None else {**GPTQ, "lm_head": said}
    tensors = {name: tensor for name, tensor in whole(vocab_size=8).items() if "lm_head" not in name}
    config = {**CONFIG, "vocab_size": 8, "quantization_config": section}

    assert rules(verify(model(tmp_path, tensors | gptq("lm_head"), **config))) == found


def test_an_unknown_type_is_one_note(tmp_path: Path) -> None:
    report = verify(model(tmp_path, whole(), **{**CONFIG, "model_type": "llama9"}))

    assert report.verdict == "ok"
    assert [note.split(",")[0] for note in report.notes] == ["config.json: model_type is 'llama9'"]


def test_names_of_another_tool_are_one_note(tmp_path: Path) -> None:
    names = ["tok_embeddings.weight", "norm.weight", "layers.0.attention.wq.weight"]
    report = verify(
        model(tmp_path, {name: torch.ones(16, 16)[: 1 + i] for i, name in enumerate(names)}, **CONFIG)
    )

    (note,) = report.notes
    assert note.startswith("config.json: the names of its layers are not those of model_type llama: ")
    assert "architecture-missing" not in rules(report)


def test_fused_and_gathered_names_are_sound(tmp_path: Path) -> None:
    tensors = whole()
    for layer in range(3):
        lead = f"model.layers.{layer}."
        for fused, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            place = fused.split(".")[0]
            joined = [tensors.pop(f"{lead}{place}.{part}_proj.weight") for part in parts]
            tensors[f"{lead}{fused}_proj.weight"] = torch.cat(joined)

    assert verify(model(tmp_path, tensors, **CONFIG)).findings == ()


def test_a_world_is_judged_by_whole_heads(tmp_path: Path) -> None:
    folder = model(tmp_path, whole(), **CONFIG)

    assert rules(verify(folder, tp=1)) == rules(verify(folder, tp=2)) == rules(verify(folder, tp=4)) == set()
    heads = [each for each in verify(folder, tp=8).findings if "heads" in each.message]
    assert [(each.rule, each.tensor) for each in heads] == [
        ("tensor-parallel", f"model.layers.{layer}.self_attn.q_proj") for layer in range(3)
    ]
    assert "query heads = 4 does not divide into 8 ranks" in heads[0].message


def test_half_a_head_is_no_share(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 2,
        "num_hidden_layers": 1,
    }
    report = verify(model(tmp_path, whole(**config), **config), tp=2)

    assert [(each.rule, each.tensor) for each in report.findings] == [
        ("tensor-parallel", f"model.layers.0.self_attn.{name}_proj") for name in "kv"
    ]


LATENT: dict[str, Any] = {
    **CONFIG,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "moe_intermediate_size": 12,
    "n_routed_experts": 2,
    "first_k_dense_replace": 0,
}


def test_a_layer_that_predicts_further_words_has_what_only_these_have(tmp_path: Path) -> None:
    tensors = whole(**LATENT)
    predictor = {
        name.replace("layers.1.", "layers.2."): torch.randn(tensor.shape)
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    joining = {f"model.layers.2.{name}.weight": torch.randn(16) for name in ("enorm", "hnorm")}
    joining["model.layers.2.eh_proj.weight"] = torch.randn(16, 32)
    for folder in ("last", "predicts"):
        (tmp_path / folder).mkdir()

    sound = verify(model(tmp_path / "predicts", {**tensors, **predictor, **joining}, **LATENT))
    (finding,) = verify(model(tmp_path / "last", {**tensors, **predictor}, **LATENT)).findings

    assert sound.findings == ()
    assert (finding.rule, finding.severity, finding.tensor) == ("layer-count", "warning", "model.layers.2")


def test_a_head_that_differs_from_what_it_is_tied_to_is_told_with_the_first_row(
    tmp_path: Path,
) -> None:
    tensors = whole(tie_word_embeddings=False)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][13:, 3] += 1

    (finding,) = verify(model(tmp_path, tensors, **CONFIG, tie_word_embeddings=True)).findings

    assert finding.message.startswith("lm_head.weight: differs from row 13 on; the config ties it to ")
