"""Draft models with borrowed layers, and damaged whole models without the same layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.architecture.drafts import draft_of
from qload.verify import verify
from tests.verify.checkpoints import GPTQ, gptq, model, rules
from tests.verify.draft_models import DRAFT, ONE, SMALL, VOCABULARY, Case, H, eagle, eagle3, mtp, nextn
from tests.verify.rules.test_architecture import CONFIG, LATENT, whole

pytestmark = pytest.mark.usefixtures("seen_texts")

DRAFTS: dict[str, Case] = {
    "eagle by its tensors": (eagle(), {**ONE, "architectures": ["LlamaForCausalLM"]}),
    "eagle without an embedding": (eagle(embedding=False), {**ONE, "architectures": ["LlamaForCausalLM"]}),
    "eagle by its class": (eagle("model."), {**ONE, "architectures": ["EagleLlamaForCausalLM"]}),
    "eagle 3": (eagle3("midlayer."), {**SMALL, "architectures": ["LlamaForCausalLMEagle3"]}),
    "eagle 3, whose model is tied": (
        {**eagle3("midlayer."), "embed_tokens.weight": torch.randn(VOCABULARY, H)},
        {**SMALL, "architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": True},
    ),
    "eagle 3 by its tensors": (eagle3("midlayer."), {**SMALL, "architectures": ["LlamaForCausalLM"]}),
    "eagle 3 in layers": (eagle3("layers.0."), {**SMALL, "architectures": ["Eagle3LlamaForCausalLM"]}),
    "eagle 3 of speculators": (
        eagle3("layers.0."),
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT,
            "transformer_layer_config": ONE,
        },
    ),
    "medusa": (
        {f"medusa_heads.{head}.0.linear.weight": torch.randn(H, H) for head in range(3)},
        {**CONFIG, "architectures": ["LlamaForCausalLM"], "medusa_num_heads": 3},
    ),
    "nextn": (nextn(0), {**LATENT, "num_hidden_layers": 1, "architectures": ["DeepseekV3ForCausalLMNextN"]}),
    "an exported layer": (nextn(2), {**LATENT, "model_type": "deepseek_mtp"}),
    "an exported layer under the config of its model": (
        nextn(2),
        {**LATENT, "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1},
    ),
    "mtp alone": (mtp(), {**CONFIG, "architectures": ["LlamaForCausalLM"]}),
    "a model with mtp": ({**whole(), **mtp()}, {**CONFIG, "architectures": ["LlamaForCausalLM"]}),
}


@pytest.mark.parametrize("case", DRAFTS)
def test_a_draft_is_not_accused_of_what_it_borrows(case: str, tmp_path: Path) -> None:
    tensors, config = DRAFTS[case]

    report = verify(model(tmp_path, tensors, **config))

    assert (report.verdict, report.findings) == ("ok", ())


def without(tensors: dict[str, Tensor], *lost: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not any(map(name.count, lost))}


LLAMA = {"architectures": ["LlamaForCausalLM"]}
DAMAGED: dict[str, tuple[Case, str]] = {
    "a whole model without its head": (
        (without(whole(), "lm_head"), {**CONFIG, **LLAMA}), "architecture-missing"),
    "a whole model with an fc and without its head": (
        ({**without(whole(), "lm_head"), "fc.weight": torch.randn(H, 2 * H)}, {**CONFIG, **LLAMA}),
        "architecture-missing"),
    "a draft whose head has lost inputs": (
        ({**eagle3("layers.0."), "lm_head.weight": torch.randn(DRAFT, H - 8)},
         {**SMALL, "architectures": ["Eagle3LlamaForCausalLM"]}), "architecture-shape"),
    "a whole model without norms": (
        (without(whole(), "input_layernorm"), {**CONFIG, **LLAMA}), "architecture-missing"),
    "a model with mtp without its head": (
        (without({**whole(), **mtp()}, "lm_head"), {**CONFIG, **LLAMA}), "architecture-missing"),
    "a model with mtp without a layer": (
        (without({**whole(), **mtp()}, "model.layers.1."), {**CONFIG, **LLAMA}), "layer-count"),
    "a model that lost all but its first layer": (
        (without(whole(), "layers.1.", "layers.2."), {**CONFIG, **LLAMA}), "layer-count"),
    "a head of the draft's size in a whole model": (
        ({**whole(), "lm_head.weight": torch.randn(DRAFT, H)}, {**CONFIG, **LLAMA}), "architecture-shape"),
    "a draft whose output projection is cut": (
        ({**eagle3("layers.0."), "layers.0.self_attn.o_proj.weight": torch.randn(H, 8)},
         {**SMALL, "architectures": ["Eagle3LlamaForCausalLM"]}), "architecture-shape"),
    "a draft whose head is cut": (
        ({**eagle3("layers.0."), "lm_head.weight": torch.randn(DRAFT - 1, H)},
         {**SMALL, "architectures": ["Eagle3LlamaForCausalLM"]}), "architecture-shape"),
    "a draft with a NaN": (
        ({**eagle(), "layers.0.mlp.up_proj.weight": torch.full((24, H), torch.nan)}, {**ONE, **LLAMA}),
        "float-value"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_of_the_same_look_is_found(case: str, tmp_path: Path) -> None:
    (tensors, config), rule = DAMAGED[case]

    assert rule in rules(verify(model(tmp_path, tensors, **config)))


def test_a_part_of_a_quantized_layer_is_missed_in_a_draft_too(tmp_path: Path) -> None:
    tensors = {**gptq("midlayer.mlp.up_proj"), "fc.weight": torch.randn(H, 3 * H), "d2t": torch.arange(8)}
    del tensors["midlayer.mlp.up_proj.scales"]

    report = verify(model(tmp_path, tensors, quantization_config=GPTQ, **ONE, draft_vocab_size=8))

    assert rules(report) == {"missing-tensor"}


def test_a_head_that_predicts_further_words_may_be_quantized(tmp_path: Path) -> None:
    """GLM-4.x stores such a head: it is not tied, and no entry of the config names it."""
    lead = "model.layers.2."
    tensors = {**whole(**LATENT), **without(nextn(2), "shared_head.head")}
    tensors |= gptq(f"{lead}shared_head.head")
    config = {**LATENT, "num_nextn_predict_layers": 1, "quantization_config": GPTQ}

    report = verify(model(tmp_path, tensors, **config), tier="headers")

    assert (report.verdict, report.coverage and report.coverage.unexplained) == ("ok", 0)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "EAGLE"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3"),
        ({"speculators_model_type": "peagle"}, "EAGLE-3"),
        ({"architectures": ["MiMoMTPModel"]}, "MTP"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "MTP"),
        ({"model_type": "medusa"}, "Medusa"),
        ({"model_type": "mlp_speculator"}, "MLP speculator"),
        ({"architectures": ["HydraModel"]}, "Hydra"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash"),
        ({"architectures": ["Qwen3ForCausalLM"], "dflash_config": {}, "draft_vocab_size": 32000}, "DFlash"),
        ({"architectures": ["Qwen3ForCausalLM"], "draft_vocab_size": 32000}, "EAGLE-3"),
        ({"speculators_model_type": "new"}, "draft"),
        ({"architectures": ["Eagle2_5_VLForConditionalGeneration"], "vision_config": {}}, None),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None),
        ({"architectures": [7, None], "model_type": ["eagle"]}, None),
        ({}, None),
    ],
)
def test_the_config_of_a_draft_names_its_kind(config: dict[str, Any], kind: str | None) -> None:
    draft = draft_of(config, ["model.layers.0.mlp.up_proj.weight"])

    assert (draft and draft.kind) == kind


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["layers.0.mlp.up_proj.weight", "fc.weight"], "EAGLE"),
        (["layers.0.mlp.up_proj.weight", "layers.0.hidden_norm.weight", "fc.weight"], "EAGLE-3"),
        (["midlayer.mlp.up_proj.weight"], "EAGLE-3"),
        (["mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight"], "MTP"),
        (["model.layers.61.eh_proj.weight", "model.layers.61.mlp.up_proj.weight"], "MTP"),
        (["medusa_heads.0.0.linear.weight", "medusa_heads.0.1.weight"], "Medusa"),
        (["medusa_heads.0.0.linear.weight", "model.layers.0.mlp.up_proj.weight"], None),
        (["0.0.linear.weight", "0.1.weight"], None),
        (["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "fc.weight"], None),
        ([], None),
    ],
)
def test_the_tensors_of_a_draft_tell_its_kind(names: list[str], kind: str | None) -> None:
    draft = draft_of({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, names)

    assert (draft and draft.kind) == kind
