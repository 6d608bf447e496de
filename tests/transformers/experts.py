"""Experts against transformers' own blocks: only `nox -s transformers` collects this file.

Both are compared with the same block in float64, and may be off by what float32 can cost: a bound that
follows from the block's own numbers.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from qload import ExpertFacts, ExpertsWeight, LocalExperts, UnquantizedWeight, routing_of
from qload.experts.activation import GatedActivation
from qload.experts.weight import stacked
from qload.kernels.bounds import Bounded, exact, product, sigmoid
from qload.spec import Layer
from tests.experts.bounds import Matrices, assert_within
from tests.experts.drawn import what_is_exact

BLOCKS: dict[str, type[Any]] = {
    "mixtral": MixtralSparseMoeBlock,
    "qwen2_moe": Qwen2MoeSparseMoeBlock,
    "qwen3_moe": Qwen3MoeSparseMoeBlock,
    "gpt_oss": GptOssMLP,
    "llama4_text": Llama4TextMoe,
    "deepseek_v2": DeepseekV2Moe,
    "deepseek_v3": DeepseekV3MoE,
    "deepseek_v32": DeepseekV32MoE,
    "glm4_moe": Glm4MoeMoE,
    "glm4_moe_lite": Glm4MoeLiteMoE,
}
E, H, INNER = 8, 40, 24
SIZES: dict[str, Any] = {
    "hidden_size": H,
    "num_attention_heads": 1,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": 20,
}
MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": E, "intermediate_size": INNER},
    "qwen2_moe": {"num_experts": E},
    "qwen3_moe": {"num_local_experts": E},
    "gpt_oss": {"num_local_experts": E, "intermediate_size": INNER},
    "llama4_text": {"num_local_experts": E, "intermediate_size": INNER},
    "deepseek_v2": {
        "n_routed_experts": E,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
    },
    "deepseek_v3": {"n_routed_experts": E, "n_group": 4, "topk_group": 2},
    "deepseek_v32": {"n_routed_experts": E, "n_group": 4, "topk_group": 2},
    "glm4_moe": {"n_routed_experts": E, "routed_scaling_factor": 2.5},
    "glm4_moe_lite": {"n_routed_experts": E},
}
TRANSPOSED = ("gpt_oss", "llama4_text")
ACTS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def block_of(kind: str, act: str, seed: int) -> tuple[Any, Any]:
    """A config and transformers' block of random numbers; scores of gpt-oss's gates pass its limit."""
    config = AutoConfig.for_model(kind, **{**SIZES, **MORE[kind]}, hidden_act=act)
    config._experts_implementation = "eager"
    block, generator = BLOCKS[kind](config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in block.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (2 if kind == "gpt_oss" else 0.5))
        for buffer in block.buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return config, block


def matrices(kind: str, experts: Any) -> dict[int, Matrices]:
    """transformers' stacks as plain matrices of each expert."""
    found = {}
    for e in range(E):
        gate_up, down = experts.gate_up_proj.data[e], experts.down_proj.data[e]
        if kind in TRANSPOSED:
            gate_up, down = gate_up.T, down.T
        if kind != "gpt_oss":
            found[e] = Matrices(gate_up[:INNER], gate_up[INNER:], down)
            continue
        bias = experts.gate_up_proj_bias.data[e]
        biases = (bias[::2], bias[1::2], experts.down_proj_bias.data[e])
        found[e] = Matrices(gate_up[::2], gate_up[1::2], down, *biases)
    return found


def typed(kind: str, experts: Any, activation: GatedActivation) -> ExpertsWeight:
    """The same as typed weights."""
    held = matrices(kind, experts)
    both = [torch.cat([held[e].gate, held[e].up]) for e in range(E)]
    first = [UnquantizedWeight(weight=w, layer=Layer((INNER, INNER), H, (2 * INNER, H))) for w in both]
    second = [UnquantizedWeight(weight=held[e].down.contiguous()) for e in range(E)]
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if kind == "gpt_oss":
        joined = [torch.cat([each.gate_bias, each.up_bias]) for each in held.values()]
        biases = torch.stack(joined), experts.down_proj_bias.data
    facts = ExpertFacts(activation, "input" if kind == "llama4_text" else "output")
    stacks = stacked("gate_up", E, first), stacked("down", E, second)
    return ExpertsWeight(*stacks, facts, LocalExperts(0, E, E), *biases)


def shared(block: Any, x: Tensor, kind: str) -> Bounded | None:
    """The expert of all tokens, which no routing weight and no factor reaches; None: there is none."""
    held = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
    if held is None:
        return None
    own = Matrices(*(getattr(held, f"{name}_proj").weight.data for name in ("gate", "up", "down")))
    out = own(exact(x), kind)
    gate = getattr(block, "shared_expert_gate", None)
    return out if gate is None else out * sigmoid(product(exact(x), gate.weight.data))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_of_transformers_and_ours_are_the_same_within_float32(kind: str, seed: int, act: str) -> None:
    config, block = block_of(kind, act, seed)
    activation = GatedActivation(ACTS[act])
    if kind == "gpt_oss":
        activation = GatedActivation("clamped_swiglu", config.swiglu_alpha, config.swiglu_limit)
    routing = routing_of(config.to_dict())
    router = block.router if hasattr(block, "router") else block.gate
    weight = typed(kind, block.experts, activation)
    x = torch.randn(9, H, generator=torch.Generator().manual_seed(seed))

    with torch.no_grad():
        theirs = block(x.view(3, 3, H))
        logits = routing.logits(x, router.weight, getattr(router, "bias", None))
        ids, weights = routing.route(logits, getattr(router, "e_score_correction_bias", None))
        ours = weight.get_linear()(x, ids, weights)

    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).reshape(9, H)
    act_of = (activation.kind, activation.alpha, activation.limit)
    routed = what_is_exact(x, ids, weights, matrices(kind, block.experts), weight.facts.side, *act_of)
    assert_within(ours, routed)
    beside = shared(block, x, ACTS[act])
    assert_within(theirs, routed if beside is None else routed + beside)


def test_the_gates_of_gpt_oss_pass_the_limit_on_both_sides() -> None:
    _, block = block_of("gpt_oss", "silu", 0)
    x = torch.randn(9, H, generator=torch.Generator().manual_seed(0))

    gate_up = x @ block.experts.gate_up_proj.data + block.experts.gate_up_proj_bias.data[:, None]

    assert float(gate_up.max()) > 7
    assert float(gate_up.min()) < -7
