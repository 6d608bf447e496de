"""Routing against transformers' own routers: only `nox -s transformers` collects this file."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from qload import Routing, routing_of
from qload.experts.routing import ROUTERS
from qload.testing import assert_same_bits

DRAWS = 1000
OF_A_CONFIG = 10
MODULES: dict[str, type[Any]] = {
    "mixtral": MixtralTopKRouter,
    "qwen2_moe": Qwen2MoeTopKRouter,
    "qwen3_moe": Qwen3MoeTopKRouter,
    "gpt_oss": GptOssTopKRouter,
    "llama4_text": Llama4Router,
    "deepseek_v2": DeepseekV2TopkRouter,
    "deepseek_v3": DeepseekV3TopkRouter,
    "deepseek_v32": DeepseekV32TopkRouter,
    "glm4_moe": Glm4MoeTopkRouter,
    "glm4_moe_lite": Glm4MoeLiteTopkRouter,
}
GENERATED = ("deepseek_v32", "glm4_moe", "glm4_moe_lite")  # types without a default of the number of experts
GROUPED = ("deepseek_v2", "deepseek_v3", *GENERATED)
COUNTS = {**dict.fromkeys(GROUPED, "n_routed_experts"), "qwen2_moe": "num_experts"}


def drawn(kind: str, chance: random.Random) -> Any:
    """A config of a type whose routers choose lawfully."""
    groups, size = chance.choice([1, 2, 4, 8]), chance.choice([2, 3, 4, 8, 32])
    top_groups = chance.randint(1, groups)
    grouped = kind in GROUPED
    most = min(top_groups * size if grouped else groups * size, 8)
    extras: dict[str, Any] = {"norm_topk_prob": chance.random() < 0.5}
    if grouped:
        extras |= {"n_group": groups, "topk_group": top_groups}
        extras["routed_scaling_factor"] = chance.choice([1.0, 2.5, 16.0, 0.3])
    if kind == "deepseek_v2":
        extras["topk_method"] = chance.choice(["greedy", "group_limited_greedy"])
    return AutoConfig.for_model(
        kind,
        hidden_size=groups * size,
        num_attention_heads=1,
        num_experts_per_tok=chance.randint(1, most),
        **{COUNTS.get(kind, "num_local_experts"): groups * size},
        **extras,
    )


def filled(shape: tuple[int, ...], ties: bool, generator: torch.Generator) -> Tensor:
    """Normal numbers, or few different ones."""
    if ties:
        return torch.randint(-2, 3, shape, generator=generator) / 2
    return torch.randn(shape, generator=generator)


def made(config: Any, ties: bool, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """transformers' router; with `ties` its logits are its inputs, of which many are alike."""
    module = MODULES[config.model_type](config)
    size = config.hidden_size
    module.weight.data = torch.eye(size) if ties else torch.randn(size, size, generator=generator)
    if getattr(module, "bias", None) is not None:
        module.bias.data = filled((size,), ties, generator)
    if hasattr(module, "e_score_correction_bias"):
        module.e_score_correction_bias.copy_(filled((size,), ties, generator))
    return module.to(dtype)


def theirs(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, ids and weights of transformers."""
    if isinstance(module, Llama4Router):
        scores, logits = module(x)
        ids = logits.topk(module.top_k, dim=1).indices
        return logits, ids, scores.gather(1, ids)
    logits, weights, ids = module(x)
    return logits, ids, weights


@pytest.mark.parametrize("ties", [False, True], ids=["drawn", "ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", MODULES)
def test_ids_and_weights_are_transformers_bits(kind: str, dtype: torch.dtype, ties: bool) -> None:
    chance, generator = random.Random(f"{kind} {dtype} {ties}"), torch.Generator().manual_seed(7)
    tied = 0
    for draw in range(DRAWS):
        if draw % OF_A_CONFIG == 0:
            config = drawn(kind, chance)
            routing = routing_of(config.to_dict())
        with torch.no_grad():
            module = made(config, ties, dtype, generator)
            x = filled((chance.randint(1, 5), config.hidden_size), ties, generator).to(dtype)
            logits, ids, weights = theirs(module, x)
            own = routing.logits(x, module.weight, getattr(module, "bias", None))
            chosen = routing.route(own, getattr(module, "e_score_correction_bias", None))

        assert_same_bits(own, logits)
        assert_same_bits(chosen[0], ids)
        assert_same_bits(chosen[1], weights)
        tied += any(len(set(row)) < len(row) for row in own.tolist())
    assert tied or not ties


@pytest.mark.parametrize("kind", MODULES)
def test_what_a_config_leaves_out_is_as_transformers_has_it(kind: str) -> None:
    full = AutoConfig.for_model(kind)
    bare = {"model_type": kind, **({"num_experts_per_tok": 6} if kind == "deepseek_v2" else {})}
    bare |= {"n_routed_experts": full.n_routed_experts} if kind in GENERATED else {}
    full.num_experts_per_tok = bare.get("num_experts_per_tok", full.num_experts_per_tok)

    assert routing_of(bare) == routing_of(full.to_dict())


def test_every_type_with_experts_is_compared() -> None:
    assert set(MODULES) == set(ROUTERS)
    assert isinstance(routing_of({"model_type": "llama4", "text_config": {}}), Routing)
