"""Every causal type with experts on qload, against transformers' own of what the codes mean.

Only `nox -s transformers` collects this file.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qload.engines.transformers import TypedExperts
from qload.engines.transformers.operands import ClassExperts
from tests.engines.transformers.models import RANGE, Stored, logits, of_kind
from tests.engines.transformers.tiny_types import stored_type
from tests.models.recorded import off

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
KINDS = (
    *("afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2"),
    *("deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe"),
    *("flex_olmo", "flint", "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss"),
    *("granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4"),
    *("inkling2_text", "inkling_text", "jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2_moe"),
    *("llama4_text", "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2"),
    *("minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text"),
    *("qwen3_moe", "qwen3_next", "solar_open", "zaya"),
)
LEFT_OUT = {
    "dbrx": "its experts are matrices of all experts, which no tool quantizes by this version's names",
    "granitemoehybrid": "this version of transformers runs it with no cache alone",
    "qwen4_exp_text": "its embeddings of n-grams need sizes of their own",
    **dict.fromkeys(
        ("dots3_note", "gemma4", "llama4", "qwen3_5_moe", "qwen4_exp"), "its text model is in the list"
    ),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "a draft of another model"),
}
STACKED = (
    *("gemma4_text", "granitemoe", "granitemoe_swa", "granitemoeshared", "hy_v4", "llama4_text"),
    *("minimax_m3_vl_text", "zaya"),
)


def assert_same(stored: Stored) -> Any:
    """The model on qload, which has the logits of the plain one."""
    plain, model = stored.plain(), stored.load().eval()
    with torch.no_grad():
        assert off(logits(model, IDS), logits(plain, IDS)) < RANGE
    return model


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "w4a16") for kind in KINDS), *((kind, "fp8 block") for kind in KINDS[::4])]
)
def test_a_type_with_experts_has_the_logits_of_what_its_codes_mean(kind: str, name: str) -> None:
    model = assert_same(stored_type(kind, name))

    plain = [name for name, each in model.named_parameters() if each.ndim == 3 and "expert" in name]
    assert plain or of_kind(model, TypedExperts) or of_kind(model, ClassExperts)


@pytest.mark.parametrize("kind", STACKED)
def test_stacks_are_in_the_order_of_their_class(kind: str) -> None:
    model = assert_same(stored_type(kind, "fp8 block", stacks=True))

    assert not any(each.ndim == 3 and ".experts." in name for name, each in model.named_parameters())


def test_no_type_with_experts_is_left_out() -> None:
    found = set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        folder = Path(inspect.getfile(CONFIG_MAPPING[kind])).parent
        if any("@use_experts_implementation" in file.read_text() for file in folder.glob("modeling_*.py")):
            found.add(kind)

    assert found - {*LEFT_OUT} - {*KINDS} == set()
