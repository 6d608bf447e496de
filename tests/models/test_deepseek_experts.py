"""DeepSeek's sparse layers: how experts are chosen, weighed and added; the traps by number."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from qload import FakeWorld, Fp8Quantizer, MemoryStorage, QuantizingLoader, Weights, WeightsLoader
from qload.detect import loader_from_config
from qload.models.config import text_config
from qload.models.feed_forward import SparseFeedForward
from qload.models.stored_layers import Making
from qload.parallel import ProcessGroup
from tests.models.latent_formula import SMALL, drawn

PREFIX = "model.layers.1.mlp"
PLAIN = loader_from_config(None)
AS_THEY_COME: dict[str, Any] = {  # inputs are not quantized
    "make": lambda weight, bias, maximum: weight.get_linear(bias, activations="unquantized"),
    "make_experts": lambda weight, maximum: weight.get_linear(activations="unquantized"),
}
OF_RANGE = 1e-5  # how far float32 may be off: what logits of models are held to
V2 = {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
V3 = {"routed_scaling_factor": 2.5, "norm_topk_prob": True}


def loaded(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    group: ProcessGroup,
    loader: WeightsLoader = PLAIN,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> SparseFeedForward:
    weights = Weights(MemoryStorage(tensors), loader=loader, process_group=group, dtype=dtype)
    return SparseFeedForward(weights, PREFIX, text_config(config), Making(dtype, **how))


def tokens(count: int = 9, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, SMALL["hidden_size"], generator=torch.Generator().manual_seed(3)).to(dtype)


def by_formula(x: Tensor, tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """Token by token, expert by expert, in float64; the choice in numbers of Python."""
    matrix = {
        name.removeprefix(f"{PREFIX}.").removesuffix(".weight"): tensor.double()
        for name, tensor in tensors.items()
        if name.startswith(PREFIX)
    }

    def gated(token: Tensor, lead: str) -> Tensor:
        inner = torch.nn.functional.silu(matrix[f"{lead}.gate_proj"] @ token) * (
            matrix[f"{lead}.up_proj"] @ token
        )
        return matrix[f"{lead}.down_proj"] @ inner

    made = []
    for token in x.double():
        logits = matrix["gate"] @ token
        v3 = config["model_type"] == "deepseek_v3"
        scores = (logits.sigmoid() if v3 else logits.softmax(0)).tolist()
        bias = matrix["gate.e_score_correction_bias"].tolist() if v3 else [0.0] * 8
        choice = [score + more for score, more in zip(scores, bias, strict=True)]
        groups = [sorted(choice[at : at + 2], reverse=True)[: 2 if v3 else 1] for at in range(0, 8, 2)]
        best = sorted(range(4), key=lambda at: -sum(groups[at]))[:2]
        chosen = sorted((e for e in range(8) if e // 2 in best), key=lambda e: -choice[e])[:3]
        total = sum(scores[e] for e in chosen) if v3 else 1.0
        routed = sum(gated(token, f"experts.{e}") * (scores[e] / total) for e in chosen)
        made.append(config["routed_scaling_factor"] * routed + gated(token, "shared_experts"))
    return torch.stack(made)


@pytest.mark.parametrize("kind", [V2, V3], ids=["v2", "v3"])
@pytest.mark.parametrize(("ranks", "split"), [(1, "tensor"), (2, "tensor"), (4, "experts"), (8, "tensor")])
def test_trap_57_the_factor_reaches_routed_experts_once_and_shared_ones_never(
    kind: dict[str, Any], ranks: int, split: str
) -> None:
    config = {**SMALL, **kind}
    tensors, x = drawn(config), tokens()
    expected = by_formula(x, tensors, config)

    made = FakeWorld(ranks).run(lambda group: loaded(config, tensors, group, split=split)(x))

    assert all(each.equal(made[0]) for each in made)
    assert (made[0] - expected).abs().max() <= OF_RANGE * (expected.max() - expected.min())


def test_trap_58_the_correction_bias_is_read_and_stays_float32_beside_bfloat16() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in drawn(SMALL).items()}
    name = f"{PREFIX}.gate.e_score_correction_bias"
    tensors[name] = 1 + torch.rand(8, generator=torch.Generator().manual_seed(0))  # no bfloat16

    def work(group: ProcessGroup) -> Tensor | None:
        return loaded(SMALL, tensors, group, dtype=torch.bfloat16).router.correction_bias

    for made in FakeWorld(2).run(work):
        assert made is not None
        assert made.dtype == torch.float32
        assert made.equal(tensors[name])


def test_trap_58_a_missing_correction_bias_is_no_bias_of_zeros() -> None:
    tensors = drawn(SMALL)
    del tensors[f"{PREFIX}.gate.e_score_correction_bias"]

    with pytest.raises(KeyError, match="e_score_correction_bias"):
        FakeWorld(1).run(lambda group: loaded(SMALL, tensors, group))


PER = [("tensor", None), ("channel", None), ("block", (8, 8))]


@pytest.mark.parametrize(("per", "block"), PER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trap_62_experts_quantized_while_loading_multiply(
    per: Literal["tensor", "channel", "block"], block: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    """As the layer with the same weights dequantized; bfloat16 rounds four times: weights, gate and up, their
    product, the output."""
    tensors, x = drawn(SMALL), tokens(dtype=dtype)
    loader = QuantizingLoader(PLAIN, Fp8Quantizer(per, block))
    plain = Weights(MemoryStorage(tensors), loader=loader)
    matrices = [
        name.removesuffix(".weight") for name in tensors if name.startswith(PREFIX) and "_proj" in name
    ]
    meant = tensors | {f"{name}.weight": plain.get_weights(name).dequantize() for name in matrices}
    expected = by_formula(x, meant, SMALL | V3)

    made = FakeWorld(2).run(lambda group: loaded(SMALL | V3, tensors, group, loader, dtype)(x))

    assert made[0].dtype == dtype
    assert made[0].equal(made[1])
    lost = OF_RANGE if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert (made[0].double() - expected).abs().max() <= lost * (expected.max() - expected.min())


@pytest.mark.parametrize(("per", "block"), PER)
@pytest.mark.parametrize("ranks", [1, 2])
def test_trap_62_experts_that_are_stored_in_fp8_are_those_quantized_while_loading(
    per: Literal["tensor", "channel", "block"], block: tuple[int, int] | None, ranks: int
) -> None:
    tensors, x = drawn(SMALL), tokens(dtype=torch.bfloat16)
    loader = QuantizingLoader(PLAIN, Fp8Quantizer(per, block))
    quantizing = Weights(MemoryStorage(tensors), loader=loader, dtype=torch.bfloat16)
    stored = dict(tensors)
    for name in [name for name in tensors if name.startswith(PREFIX) and "_proj" in name]:
        made = quantizing.get_weights(name.removesuffix(".weight")).fields()
        scale = "weight_scale_inv" if per == "block" else "weight_scale"
        stored[name] = made["weight"]
        stored[name.replace("weight", scale)] = made["weight_scale"]
    said = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    reader = loader_from_config({**said, "weight_block_size": list(block)} if block else said)

    def ran(held: dict[str, Tensor], by: WeightsLoader) -> list[Tensor]:
        how = {"dtype": torch.bfloat16, **AS_THEY_COME}
        return FakeWorld(ranks).run(lambda group: loaded(SMALL, held, group, by, **how)(x))

    while_loading, read = ran(tensors, loader), ran(stored, reader)

    assert all(each.equal(while_loading[0]) for each in (*while_loading, *read))
