"""Experts whose inputs are quantized: as each expert's own linears do it, whole and shared."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import ArgumentError, MismatchError
from qload.kernels import declared
from qload.kernels.activations import quantize
from qload.parallel import FakeWorld, maximum_over
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.experts.expert_layers import FACTS, PREFIX
from tests.kernels.activation_cases import distance

pytestmark = pytest.mark.usefixtures("seen_texts")

H, INNER, COUNT = 16, 32, 4
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 8, "dynamic": True}


def config(inputs: dict[str, Any], **others: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"a": group, **others},
    }


def tensors(static: bool) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(5)
    made = {}
    for e in range(COUNT):
        for name, (N, K) in {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}.items():
            prefix = f"{PREFIX}.{e}.{name}_proj"
            made[f"{prefix}.weight"] = torch.randint(-128, 128, (N, K), generator=make).to(torch.int8)
            made[f"{prefix}.weight_scale"] = torch.rand(N, 1, generator=make).log2().round().exp2() / 64
            if static:
                made[f"{prefix}.input_scale"] = torch.full((1,), 2.0 ** (e - 3))
    return made


def opened(inputs: dict[str, Any], group: Any = None) -> Weights:
    storage = MemoryStorage(tensors(not inputs["dynamic"]))
    options = {} if group is None else {"process_group": group}
    return Weights(storage, loader=loader_from_config(config(inputs)), **options)


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens whose scales are powers of two, so that gate and up are exact sums, and one expert for each.

    Every eight inputs have 7 as their largest, whose 64th is 448 in e4m3; every token has 127.5 and -127.5
    eighths, but for groups.
    """
    make = torch.Generator().manual_seed(6)
    x = torch.randint(-7, 8, (5, H), generator=make).float()
    x[:, ::8] = 7
    return x, torch.tensor([[3], [0], [2], [1], [3]]), torch.ones(5, 1)


def tokens_for(inputs: dict[str, Any], x: Tensor) -> Tensor:
    if inputs["strategy"] != "token":
        return x
    made = x.clone()
    made[:, 1], made[:, 2] = 127.5 / 8, -127.5 / 8
    return made


def between(weights: Weights, row: Tensor, e: int) -> Tensor:
    """What comes of gate and up of an expert, each a linear of its own."""
    gate, up = (weights.get_weights(f"{PREFIX}.{e}.{name}_proj").get_linear()(row) for name in ("gate", "up"))
    made: Tensor = torch.nn.functional.silu(gate) * up
    return made


def down(weights: Weights, e: int) -> Weight:
    return weights.get_weights(f"{PREFIX}.{e}.down_proj")


def declared_of(weight: Weight, x: Tensor) -> Tensor:
    """What inputs stand for once they are quantized as a weight declares."""
    ((made, _),) = declared.quantized(x, weight, None)
    return made.dequantize()


@pytest.mark.parametrize("inputs", [TOKEN, STATIC, GROUP], ids=["token", "static", "group"])
def test_each_expert_quantizes_its_inputs_as_its_linears_do(inputs: dict[str, Any]) -> None:
    weights, (x, ids, own) = opened(inputs), routed()
    x = tokens_for(inputs, x)
    made = weights.get_experts(PREFIX, facts=FACTS)

    y = made.get_linear()(x, ids, own)

    for got, row, e in zip(y, x, ids.flatten().tolist(), strict=True):
        weight, nothing = down(weights, e), torch.zeros(())
        taken = declared_of(weight, between(weights, row, e))
        assert bool((distance(got, taken, weight.dequantize(), nothing) <= 1).all())
    assert not torch.equal(y, made.get_linear(activations="unquantized")(x, ids, own))


def test_shares_by_inputs_take_the_scale_over_all_of_them() -> None:
    x, ids, own = routed()
    x, weights = tokens_for(TOKEN, x), opened(TOKEN)

    def work(group: Any) -> Tensor:
        share = opened(TOKEN, group).get_experts(PREFIX, facts=FACTS, split="tensor")
        with pytest.raises(ArgumentError, match="maximum_over"):
            share.get_linear()
        y: Tensor = share.get_linear(maximum=maximum_over(group))(x, ids, own)
        return y

    total = torch.stack(FakeWorld(2).run(work)).sum(0)

    for y, row, e in zip(total, x, ids.flatten().tolist(), strict=True):
        weight = down(weights, e)
        assert weight.activations is not None
        taken = quantize(between(weights, row, e), weight.activations).dequantize()
        assert bool((distance(y, taken, weight.dequantize(), torch.zeros(())) <= 1).all())


def test_experts_by_ranks_need_no_other_rank() -> None:
    x, ids, own = routed()
    whole = opened(TOKEN).get_experts(PREFIX, facts=FACTS).get_linear()(x, ids, own)

    parts = [
        opened(TOKEN, group).get_experts(PREFIX, facts=FACTS, split="experts").get_linear()(x, ids, own)
        for group in FakeWorld(2)
    ]

    assert torch.equal(torch.stack(parts).sum(0), whole)


def test_one_scale_for_all_tokens_is_refused() -> None:
    made = opened({**TOKEN, "strategy": "tensor"}).get_experts(PREFIX, facts=FACTS)

    with pytest.raises(ArgumentError, match="a scale of one token at most"):
        made.get_linear()
    x, ids, own = routed()
    assert made.get_linear(activations="unquantized")(x, ids, own).shape == x.shape


def test_an_expert_whose_inputs_are_quantized_apart_is_refused() -> None:
    other = {"targets": [r"re:.*\.2\..*"], "weights": config(TOKEN)["config_groups"]["a"]["weights"],
             "input_activations": {**TOKEN, "symmetric": True}}  # fmt: skip
    loader = loader_from_config(config(TOKEN, b=other))

    with pytest.raises(MismatchError, match="experts of one layer differ"):
        Weights(MemoryStorage(tensors(False)), loader=loader).get_experts(PREFIX, facts=FACTS)


def test_moved_and_stored_scales_go_along() -> None:
    made = opened(STATIC).get_experts(PREFIX, facts=FACTS)
    x, ids, own = routed()

    assert made.gate_up.layer.activations == made.to("cpu").expert(1).gate_up.activations
    assert_same_bits(made.to("cpu").get_linear()(x, ids, own), made.get_linear()(x, ids, own))
