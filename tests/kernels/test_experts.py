"""The reference module over experts from inside: what it dequantizes, the order of its sums, its buffers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.experts import ExpertFacts, ExpertsWeight, LocalExperts
from qload.experts.activation import GatedActivation
from qload.experts.weight import stacked
from qload.formats import UnquantizedWeight
from qload.kernels.experts import Experts
from qload.spec import Layer
from qload.testing import assert_same_bits

E = 4


def experts(values: list[float], **facts: Any) -> ExpertsWeight:
    """Experts of one input and one in between: y = down * silu(gate * x) * up * x, gate and up 8 and 1."""
    gate_up = [
        UnquantizedWeight(weight=torch.tensor([[8.0], [1.0]]), layer=Layer((1, 1), 1, (2, 1))) for _ in values
    ]
    down = [UnquantizedWeight(weight=torch.tensor([[value]])) for value in values]
    count = len(values)
    return ExpertsWeight(
        stacked("gate_up", count, gate_up),
        stacked("down", count, down),
        ExpertFacts(GatedActivation("silu"), **facts),
        LocalExperts(0, count, count),
    )


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The first number of each matrix that is dequantized, one after another."""
    found: list[float] = []
    own = UnquantizedWeight.dequantize

    def counts(self: UnquantizedWeight, *arguments: Any, **named: Any) -> Tensor:
        found.append(float(self.weight[0, 0]))
        return own(self, *arguments, **named)

    monkeypatch.setattr(UnquantizedWeight, "dequantize", counts)
    return found


def test_an_expert_is_dequantized_once_and_only_if_a_token_chose_it(counted: list[float]) -> None:
    module = experts([10.0, 11.0, 12.0, 13.0]).get_linear()

    module(torch.ones(3, 1), torch.tensor([[3, 1], [1, 3], [3, 1]]), torch.ones(3, 2))

    assert counted == [8.0, 8.0, 11.0, 13.0]


def test_nothing_is_dequantized_for_no_token_and_for_experts_elsewhere(counted: list[float]) -> None:
    weight = experts([10.0, 11.0])
    share = ExpertsWeight(weight.gate_up, weight.down, weight.facts, LocalExperts(2, 4, 6))

    share.get_linear()(torch.ones(2, 1), torch.tensor([[0, 5], [1, 4]]), torch.ones(2, 2))
    share.get_linear()(torch.ones(0, 1), torch.zeros(0, 2).long(), torch.ones(0, 2))

    assert counted == []


def test_an_expert_that_no_token_chose_may_hold_anything() -> None:
    module = experts([1.0, float("nan"), 1.0, float("inf")]).get_linear()

    assert bool(module(torch.ones(1, 1), torch.tensor([[0, 2]]), torch.ones(1, 2)).isfinite().all())


def test_experts_are_added_in_the_order_of_their_numbers() -> None:
    """1e8 + 1 - 1e8 is 0 in float32, 1 where the large ones meet first."""
    silu = float(torch.nn.functional.silu(torch.tensor(8.0)))
    x, weights = torch.ones(1, 1), torch.ones(1, 3)

    lost = experts([1e8 / silu, 1 / silu, -1e8 / silu]).get_linear()
    kept = experts([1e8 / silu, -1e8 / silu, 1 / silu]).get_linear()

    for ids in ([[0, 1, 2]], [[2, 1, 0]], [[1, 0, 2]], [[0, 2, 1]]):
        assert lost(x, torch.tensor(ids), weights).tolist() == [[0.0]]
        assert kept(x, torch.tensor(ids), weights).tolist() == [[1.0]]


def test_the_sum_is_rounded_once_to_the_dtype_of_the_inputs() -> None:
    """256 + 1 + 1: rounded to bfloat16 after each step it would stay 256."""
    silu = float(torch.nn.functional.silu(torch.tensor(8.0)))
    module = experts([256 / silu, 1 / silu, 1 / silu]).get_linear()

    y = module(torch.ones(1, 1).bfloat16(), torch.tensor([[0, 1, 2]]), torch.ones(1, 3).bfloat16())

    assert_same_bits(y, torch.tensor([[258.0]]).bfloat16())


@pytest.mark.parametrize(("side", "want"), [("output", 3.0), ("input", None)])
def test_a_routing_weight_goes_where_the_facts_say(side: str, want: float | None) -> None:
    """silu(8 x) x is not linear in x."""
    module = experts([1.0], side=side).get_linear()
    one, ids, weight = torch.ones(1, 1), torch.zeros(1, 1).long(), torch.full((1, 1), 3.0)

    y = module(one, ids, weight)

    plain = experts([1.0]).get_linear()
    expected = plain(one, ids, one) * 3 if want else plain(one * 3, ids, one)
    assert_same_bits(y, expected)
    assert not torch.equal(plain(one, ids, one) * 3, plain(one * 3, ids, one))


def test_an_expert_that_is_named_twice_counts_twice() -> None:
    module = experts([1.0, 2.0]).get_linear()
    one, ones = torch.ones(1, 1), torch.ones(1, 2)

    twice = module(one, torch.tensor([[1, 1]]), ones)

    assert_same_bits(twice, 2 * module(one, torch.tensor([[1]]), ones[:, :1]))


def test_gradients_reach_inputs_and_routing_weights() -> None:
    module = experts([1.0, 2.0]).get_linear()
    x, weights = torch.ones(2, 1, requires_grad=True), torch.ones(2, 2, requires_grad=True)

    module(x, torch.tensor([[0, 1], [1, 0]]), weights).sum().backward()

    assert x.grad is not None
    assert weights.grad is not None
    assert bool((x.grad != 0).all())
    assert bool((weights.grad != 0).all())


def test_gradients_of_a_narrow_token_are_summed_over_its_experts_in_float32() -> None:
    module, ids = experts([256.0, 1.0, 1.0, 1.0]).get_linear(), torch.arange(4)[None]
    narrow, wide = (
        torch.ones(1, 1, dtype=dtype, requires_grad=True) for dtype in (torch.bfloat16, torch.float32)
    )

    for x in (narrow, wide):
        module(x, ids, torch.ones(1, 4)).sum().backward()

    assert narrow.grad is not None
    assert wide.grad is not None
    assert_same_bits(narrow.grad, wide.grad.bfloat16())


def test_the_module_holds_no_parameter_and_its_tensors_are_those_of_the_weight() -> None:
    weight = experts([1.0, 2.0])
    module = Experts(weight)

    assert list(module.parameters()) == []
    assert set(module.state_dict()) == {"gate_up_weight", "down_weight", "_extra_state"}
    assert module.get_buffer("down_weight").data_ptr() == weight.down.fields()["weight"].data_ptr()
