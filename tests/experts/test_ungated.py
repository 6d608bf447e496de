"""Experts without a gate: up and down alone; and stacks whose order a model's class knows."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from qload import (
    ExpertFacts,
    ExpertsWeight,
    FakeWorld,
    GatedActivation,
    MemoryStorage,
    Weights,
    loader_from_config,
)
from qload.errors import ArgumentError, MismatchError, MissingTensorError
from qload.experts.stack_layouts import StackOrder
from qload.experts.stacked_storage import split_stacks
from qload.parallel import ProcessGroup

E, H, INNER = 3, 8, 4
SILU = ExpertFacts(GatedActivation("silu"))


def ungated(bias: bool = False) -> dict[str, Tensor]:
    """Experts of up and down, each value of which is a number of its own."""
    tensors = {}
    for e in range(E):
        for name, shape in (("up_proj", (INNER, H)), ("down_proj", (H, INNER))):
            start = 1000.0 * e + (100 if name == "down_proj" else 0)
            tensors[f"experts.{e}.{name}.weight"] = start + torch.arange(INNER * H).reshape(shape).float()
            if bias:
                tensors[f"experts.{e}.{name}.bias"] = start + torch.arange(shape[0]).float()
    return tensors


def weights(tensors: Mapping[str, Tensor], group: ProcessGroup | None = None) -> Weights:
    options = {} if group is None else {"process_group": group}
    return Weights(MemoryStorage(dict(tensors)), loader=loader_from_config(None), **options)  # type: ignore[arg-type]


def test_up_and_down_are_loaded_for_each_expert() -> None:
    tensors = ungated(bias=True)

    experts = weights(tensors).get_experts("experts")

    assert (experts.shape, experts.gate_up.shape) == ((E, H, INNER), (E, INNER, H))
    assert experts.facts is None
    for e in range(E):
        up, down = experts.dequantize(e)
        assert torch.equal(up, tensors[f"experts.{e}.up_proj.weight"])
        assert torch.equal(down, tensors[f"experts.{e}.down_proj.weight"])
        assert experts.gate_up_bias is not None
        assert torch.equal(experts.gate_up_bias[e], tensors[f"experts.{e}.up_proj.bias"])
        assert experts.down_bias is not None
        assert torch.equal(experts.down_bias[e], tensors[f"experts.{e}.down_proj.bias"])


def test_up_and_down_may_differ_in_bias() -> None:
    tensors = {name: each for name, each in ungated(bias=True).items() if not name.endswith("up_proj.bias")}

    experts = weights(tensors).get_experts("experts")

    assert experts.gate_up_bias is None
    assert experts.down_bias is not None
    assert torch.equal(experts.down_bias[1], tensors["experts.1.down_proj.bias"])


def test_each_rank_has_outputs_of_up_and_the_same_inputs_of_down() -> None:
    tensors = ungated()

    def load(group: ProcessGroup) -> ExpertsWeight:
        return weights(tensors, group).get_experts("experts", split="tensor")

    shares = FakeWorld(2).run(load)

    for e in range(E):
        ups, downs = zip(*(share.dequantize(e) for share in shares), strict=True)
        assert torch.equal(torch.cat(ups), tensors[f"experts.{e}.up_proj.weight"])
        assert torch.equal(torch.cat(downs, 1), tensors[f"experts.{e}.down_proj.weight"])
        assert [tuple(up.shape) for up in ups] == [(INNER // 2, H)] * 2


def test_experts_without_a_gate_have_no_module_and_no_facts() -> None:
    source = weights(ungated())

    with pytest.raises(ArgumentError, match=r"facts\n  expected the activation of experts;"):
        source.get_experts("experts").get_linear()
    with pytest.raises(ArgumentError, match=r"facts\n  expected None: the experts of experts have no gate"):
        source.get_experts("experts", facts=SILU)


def test_one_gate_makes_experts_gated() -> None:
    tensors = ungated() | {"experts.1.gate_proj.weight": torch.ones(INNER, H)}

    with pytest.raises(MissingTensorError, match=r"experts\.0\.gate_proj\.weight"):
        weights(tensors).get_experts("experts", facts=SILU)


def test_an_expert_without_a_matrix_or_of_another_size_is_named() -> None:
    lost, odd = ungated(), ungated()
    del lost["experts.2.down_proj.weight"]
    odd["experts.0.down_proj.weight"] = torch.ones(H, INNER + 1)

    with pytest.raises(MissingTensorError, match=r"experts\.2\.down_proj\.weight"):
        weights(lost).get_experts("experts")
    with pytest.raises(MismatchError, match=r"experts\.0\.down_proj"):
        weights(odd).get_experts("experts")


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_stack_is_in_the_order_that_a_class_states(interleaved: bool) -> None:
    name = "m.experts.gate_up_proj"
    codes = torch.arange(E * 2 * INNER * H).reshape(E, 2 * INNER, H) // 3 % 16  # exact in FP8
    scales = torch.arange(1.0, E * 2 * INNER + 1).reshape(E, 2 * INNER, 1)
    stored = {name: codes.to(torch.float8_e4m3fn), f"{name}_scale": scales}
    config = {"hidden_size": H, "quantization_config": {"quant_method": "compressed-tensors"}}

    def gate(order: StackOrder | None) -> list[str]:
        storage = split_stacks(MemoryStorage(stored), config, lambda asked: order if asked == name else None)
        names = sorted(each for each in storage.keys() if each.startswith("m.experts.1."))  # noqa: SIM118
        if order is not None:
            rows = codes[1, 0::2] if interleaved else codes[1, :INNER]
            assert torch.equal(storage.read("m.experts.1.gate_proj.weight").float(), rows.float())
        return names

    assert gate(None) == ["m.experts.1.gate_up_proj.weight", "m.experts.1.gate_up_proj.weight_scale"]
    assert gate(StackOrder(interleaved, None)) == [
        f"m.experts.1.{part}.{field}"
        for part in ("gate_proj", "up_proj")
        for field in ("weight", "weight_scale")
    ]
