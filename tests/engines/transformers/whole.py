"""Random models of every type and format on qload, beside transformers' own of what the codes mean.

Only `nox -s transformers` collects this file.
"""

from typing import Any

import pytest
import torch

from qload import native
from qload.engines import transformers as engine
from qload.engines.transformers import LinearSlot, TypedExperts
from qload.kernels import bounds
from tests.engines.transformers.models import RANGE, greedy, logits, of_kind, shared
from tests.models.recorded import off
from tests.models.with_transformers.formats import STACKED
from tests.models.with_transformers.stored import FORMATS
from tests.native.test_experts import nothing_dequantized

TYPES = ("llama", "qwen2", "gemma", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
NAMES = ("gptq", "awq", "fp8 block", "nf4", "w4a16")
TIED: dict[str, Any] = {"tie_word_embeddings": True}
SPARSE = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in TYPES for name in NAMES])
def test_logits_and_tokens_are_those_of_what_the_codes_mean(kind: str, name: str) -> None:
    stored = shared(kind, name, **TIED)
    plain = stored.plain()

    model, found = stored.load(output_loading_info=True)

    assert not any(found.values())
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    assert off(logits(model), logits(plain)) < RANGE
    assert torch.equal(greedy(model), greedy(plain))
    stacks = kind in SPARSE and (kind not in STACKED or FORMATS[name].experts)
    assert bool(of_kind(model, TypedExperts)) == stacks
    assert of_kind(model, LinearSlot)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.skipif(native.load("cpu").found is None, reason="the CPU module is not built")
@pytest.mark.parametrize("kind", SPARSE)
def test_experts_on_a_cpu_are_multiplied_by_its_module(kind: str) -> None:
    stored = shared(kind, "w4a16", **TIED)
    with nothing_dequantized():
        got = logits(stored.load())

    assert off(got, logits(stored.plain())) < RANGE


@pytest.mark.parametrize(("kind", "name"), [("llama", "awq"), ("mixtral", "awq"), ("gpt_oss", "w4a16")])
def test_what_a_model_says_of_its_size_is_what_it_means_and_what_it_holds(kind: str, name: str) -> None:
    stored = shared(kind, name, **TIED)
    model, plain = stored.load(target=None), stored.plain()

    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
    held = {id(each): each.nbytes for each in (*model.parameters(), *model.buffers())}
    assert model.get_memory_footprint() == sum(held.values())
    assert model.get_memory_footprint() < plain.get_memory_footprint() / 2


@pytest.mark.parametrize("name", ["fp8 block", "w8a8"])
def test_declared_inputs_are_within_what_rounding_costs_the_reference(name: str) -> None:
    model = shared("llama", name, **TIED).load(activations="declared")
    calls: list[bool] = []

    def check(linear: Any, given: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        want = bounds.of_linear(given[0].flatten(0, -2), linear.typed, *given[1:])
        assert bool((bounds.excess(y.flatten(0, -2), want) <= 1).all())
        calls.append(linear.typed.activations is not None)

    slots = of_kind(model, LinearSlot).values()
    for slot in slots:
        slot.linear.register_forward_hook(check)
    logits(model)

    assert len(calls) == len(slots)
    assert all(calls)


@pytest.mark.parametrize("target", ["exllama", "auto"])
def test_what_weights_are_repacked_for_changes_no_logits(target: Any) -> None:
    stored = shared("llama", "gptq", **TIED)

    assert off(logits(stored.load(target=target)), logits(stored.load(target=None))) < RANGE


def test_a_bias_that_only_the_checkpoint_has_is_added() -> None:
    stored = shared("qwen2", "awq", **TIED)
    model = engine.load(stored.path, dtype=torch.float32, activations="unquantized")
    slot = model.get_submodule("model.layers.0.self_attn.q_proj")
    x = torch.randn(2, slot.in_features)

    with torch.no_grad():
        assert torch.equal(slot(x), slot.linear(x, slot.bias))
        assert not torch.equal(slot(x), slot.linear(x))
