"""Layers that the class of a model computes in its own way, quantized: each kind in one tiny type.

Collected where transformers is installed.
"""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from qload import open_checkpoint
from qload.engines.transformers import LinearSlot, TypedExperts
from qload.engines.transformers.operands import ClassExperts, EmbeddingRows, Matrix, MatrixSlot
from qload.errors import ArgumentError, UnsupportedFormatError
from tests.engines.transformers.models import RANGE, Stored, greedy, logits, of_kind
from tests.engines.transformers.tiny_types import SIZES, stored_model, stored_type, tiny_config, tiny_model
from tests.models.recorded import off

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def assert_same(stored: Stored, **options: Any) -> Any:
    """The model on qload, which has the logits of the plain one, and of no other experts."""
    model = stored.load(**options).eval()
    want = logits(stored.plain(), IDS)

    assert off(logits(model, IDS), want) < RANGE
    return model


@pytest.mark.parametrize(
    ("kind", "name"), [("nemotron_h", "w4a16"), ("longcat_flash", "w4a16"), ("deepseek_v4", "fp8 block")]
)
def test_experts_without_a_gate_or_with_one_of_their_own_are_computed_by_their_class(
    kind: str, name: str
) -> None:
    stored = stored_type(kind, name)
    model, plain = assert_same(stored), stored.plain()

    experts = of_kind(model, ClassExperts)
    assert experts
    assert not of_kind(model, TypedExperts)
    assert model.num_parameters() == plain.num_parameters()
    for placeholder in experts.values():  # no other linear layer computes the logits
        for linear in placeholder.linears():
            linear.register_forward_hook(lambda module, x, y: y * 2)
    assert off(logits(model, IDS), logits(plain, IDS)) > RANGE


def test_experts_of_a_class_are_copied_and_pickled_and_keep_their_dtype() -> None:
    model = stored_type("nemotron_h", "w4a16").load()

    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again, IDS), logits(model, IDS))
        (experts,) = of_kind(again, ClassExperts).values()
        assert experts is not next(iter(of_kind(model, ClassExperts).values()))
        with pytest.raises(ArgumentError, match="dtype"):
            experts.to(torch.bfloat16)


def test_a_bf16_load_of_experts_of_a_class_computes_in_bf16() -> None:
    model = stored_type("nemotron_h", "w4a16").load(dtype=torch.bfloat16)

    with torch.no_grad():
        hidden = model.model(IDS).last_hidden_state
    assert hidden.dtype == torch.bfloat16
    assert bool(hidden.isfinite().all())


@pytest.mark.parametrize("kind", ["granitemoe", "minimax_m3_vl_text"])
def test_quantized_stacks_are_in_the_order_of_their_class(kind: str) -> None:
    model = assert_same(stored_type(kind, "fp8 block", stacks=True))

    assert not any(each.ndim == 3 and ".experts." in name for name, each in model.named_parameters())


def test_a_stack_that_transformers_may_transpose_has_a_known_order_of_outputs(tmp_path: Path) -> None:
    default = AutoConfig.for_model("qwen3_vl_moe")
    text = {name: size for name, size in SIZES.items() if name in default.text_config.to_dict()}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    model = tiny_model(config, AutoModelForImageTextToText)
    stored = stored_model(model, "fp8 block", tmp_path, stacks=True)
    plain = AutoModelForImageTextToText.from_pretrained(
        stored.means, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    ).eval()

    model = stored.load(model_class=AutoModelForImageTextToText).eval()

    assert off(logits(model, IDS), logits(plain, IDS)) < RANGE
    assert of_kind(model, TypedExperts)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_quantized_embedding_are_dequantized(tied: bool, tmp_path: Path) -> None:
    config = tiny_config("gemma3_text")  # whose class multiplies the rows
    config.tie_word_embeddings = tied
    stored = stored_model(tiny_model(config), "w4a16", tmp_path, also=("embed", "lm_head"))

    model, plain = assert_same(stored), stored.plain()

    table = model.get_input_embeddings()
    assert [*of_kind(model, EmbeddingRows)] == ["model.embed_tokens.quantized_rows"]
    assert isinstance(model.lm_head, LinearSlot)
    assert (table.weight.shape, table.weight.dtype) == ((96, 64), torch.float32)
    assert torch.equal(greedy(model, IDS), greedy(plain, IDS))
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
    assert torch.equal(table.weight.float(), plain.get_input_embeddings().weight)


def test_a_quantized_router_is_multiplied_by_its_class(tmp_path: Path) -> None:
    config = tiny_config("mixtral")
    config.num_local_experts = 8
    stored = stored_model(tiny_model(config), "w4a16", tmp_path)

    model = assert_same(stored)

    routers = of_kind(model, MatrixSlot)
    assert len(routers) == 2
    assert isinstance(model.model.layers[0].mlp.gate.weight, Matrix)


def test_a_linear_class_with_a_product_of_its_own_keeps_it() -> None:
    model = stored_type("deepseek_v4", "fp8 block").load()

    (first, *_) = of_kind(model, MatrixSlot)
    assert first == "model.layers.0.self_attn.o_a_proj.quantized_weight"
    assert isinstance(model.model.layers[0].self_attn.o_a_proj, nn.Linear)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A model that sees, with gate and up of shared experts in one linear layer."""
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    text = tiny_config("minimax_m3_vl_text").to_dict()
    sizes = {**vision, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("minimax_m3_vl", text_config=text, vision_config=sizes)
    model = tiny_model(config, AutoModelForImageTextToText)
    return stored_model(model, "w4a16", tmp_path_factory.mktemp("joined"))


def test_gate_and_up_of_two_layers_are_joined_as_in_the_class(joined: Stored) -> None:
    plain = AutoModelForImageTextToText.from_pretrained(
        joined.means, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    ).eval()

    model = joined.load(model_class=AutoModelForImageTextToText).eval()

    assert off(logits(model, IDS), logits(plain, IDS)) < RANGE
    assert [name for name in of_kind(model, LinearSlot) if name.endswith("gate_up_proj")]
    assert of_kind(model, ClassExperts)


def test_a_layer_that_transformers_splits_is_refused_by_its_name() -> None:
    stored = stored_type("hrm_text", "w4a16")

    with pytest.raises(UnsupportedFormatError, match=r"attn\.gqkv_proj: .*\n.*of it by Chunk"):
        stored.load()


def test_experts_without_a_gate_are_loaded_and_have_no_module_of_their_own() -> None:
    with open_checkpoint(stored_type("nemotron_h", "w4a16").path) as weights:
        experts = weights.get_experts("backbone.layers.1.mixer.experts")
        up = weights.get_weights("backbone.layers.1.mixer.experts.2.up_proj").dequantize()

        assert experts.facts is None
        assert torch.equal(experts.expert(2).gate_up.dequantize(), up)
        with pytest.raises(ArgumentError, match=r"facts\n  expected the activation .* `expert\(index\)`"):
            experts.get_linear()
    assert SIZES["moe_intermediate_size"] == experts.shape[2]
