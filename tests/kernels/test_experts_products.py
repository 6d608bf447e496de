"""Which products of experts the CPU module gets, and what is kept; tests/native has its results."""

import gc
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.kernels import cpu, experts_function
from qload.kernels.bounds import excess, of_experts
from qload.kernels.cpu import KeptRows
from qload.kernels.experts_function import KeptMatrix
from qload.spec import Weight
from qload.testing import assert_same_bits
from tests.experts.test_module_whole import drawn, made

FLOAT32 = torch.float32


class Module:
    """Stands for the CPU module: takes what has at most `most` rows and a type of `dtypes`."""

    def __init__(self, most: int = 99, dtypes: tuple[torch.dtype, ...] = (FLOAT32, torch.bfloat16)) -> None:
        self.most, self.dtypes = most, dtypes
        self.seen: list[tuple[str, int, torch.dtype]] = []
        self.kept: list[KeptRows] = []

    def plan_of(self, weight: Weight, kept: KeptRows) -> Any:
        return SimpleNamespace(multiply=partial(self.multiply, weight, kept))

    def multiply(
        self, weight: Weight, kept: KeptRows, x: Tensor, bias: Tensor | None, *, dtype: torch.dtype
    ) -> Tensor | None:
        if len(x) > self.most or x.dtype not in self.dtypes:
            return None
        self.seen.append((weight.layer.name, len(x), x.dtype))
        self.kept.append(kept)
        y = x.float() @ weight.dequantize().T
        return (y if bias is None else y + bias.float()).to(dtype)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    one = Module()
    monkeypatch.setattr(cpu, "plan_of", one.plan_of)
    return one


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of matrices that torch multiplies."""
    found, own = list[str](), experts_function.product

    def product(x: Tensor, weight: Weight, *rest: Any) -> Tensor:
        found.append(weight.layer.name)
        return own(x, weight, *rest)

    monkeypatch.setattr(experts_function, "product", product)
    return found


def test_each_chosen_expert_is_multiplied_once_by_rows_of_its_tokens(
    module: Module, dequantized: list[str]
) -> None:
    weight = made("mxfp4", biased=True)
    x, _, weights = drawn(weight, 3, torch.bfloat16)
    ids = torch.tensor([[4, 1, 0], [1, 4, 2], [4, 2, 1]])

    weight.get_linear()(x, ids, weights)

    counts = {0: 1, 1: 3, 2: 2, 4: 3}
    first = [(weight.gate_up.names[e], n, torch.bfloat16) for e, n in counts.items()]
    assert module.seen == first + [(weight.down.names[e], n, torch.bfloat16) for e, n in counts.items()]
    assert dequantized == []


def test_results_are_right_however_many_experts_the_module_takes(
    module: Module, dequantized: list[str]
) -> None:
    weight = made("mxfp4", biased=True)
    read = drawn(weight, 3)
    whole = weight.get_linear()(*read)
    module.most, calls = 1, len(module.seen)
    some = weight.get_linear()(*read)

    assert 0 < len(module.seen) - calls < calls
    assert 0 < len(dequantized) < calls
    for y in (whole, some):
        assert bool((excess(y, of_experts(*read, weight)) <= 1).all())


def test_experts_round_the_same_for_a_token_alone_and_without_the_module(module: Module) -> None:
    """What is rounded is decided by the type of x, and by nothing that a batch or a machine has."""
    weight = made("mxfp4", biased=True)
    x, ids, weights = drawn(weight, 9, torch.bfloat16)
    layer = weight.get_linear()
    for most in (99, 0):
        module.most = most
        y = layer(x, ids, weights)
        alone = [layer(x[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(len(x))]

        assert bool((excess(y, of_experts(x, ids, weights, weight)) <= 1).all())
        assert bool((excess(torch.cat(alone), of_experts(x, ids, weights, weight)) <= 1).all())
        assert not torch.equal(y, layer(x.float(), ids, weights).bfloat16())


@pytest.mark.usefixtures("module")
def test_float64_is_left_to_torch(dequantized: list[str]) -> None:
    weight = made("mxfp4")
    x, ids, weights = drawn(weight, 3)

    weight.get_linear()(x.double(), ids, weights)

    assert len(dequantized) == 2 * len(set(ids.flatten().tolist()))


def test_what_is_kept_is_of_each_matrix_and_of_tensors_that_stay(module: Module) -> None:
    weight = made("mxfp4")
    read, layer = drawn(weight, 3), weight.get_linear()

    for _ in range(2):
        layer(*read)
    of_each = {(name, id(kept)) for (name, _, _), kept in zip(module.seen, module.kept, strict=True)}
    assert set(Counter(name for name, _ in of_each).values()) == {1}
    assert set(Counter(kept for _, kept in of_each).values()) == {1}

    before = set(map(id, module.kept))
    keep_alive = list(module.kept)
    layer.get_buffer("down_weight_scale").data = layer.get_buffer("down_weight_scale").clone()
    module.kept.clear()
    layer(*read)
    assert len(set(map(id, module.kept)) & before) * 2 == len(set(map(id, keep_alive)))


def test_tensors_in_the_place_of_others_are_those_that_are_multiplied() -> None:
    weight = made("mxfp4")
    read, layer = drawn(weight, 3), weight.get_linear()
    layer(*read)
    zeros = torch.zeros_like(layer.get_buffer("down_weight_packed"))
    layer.load_state_dict({**layer.state_dict(), "down_weight_packed": zeros}, assign=True)

    assert_same_bits(layer(*read), torch.zeros_like(read[0]))


@pytest.mark.parametrize("name", ["gate_up_bias", "down_bias"])
def test_biases_in_the_place_of_others_are_those_that_are_added(name: str) -> None:
    weight = made("mxfp4", biased=True)
    read, layer = drawn(weight, 3), weight.get_linear()
    layer(*read)
    doubled = 2 * layer.get_buffer(name)
    layer.load_state_dict({name: doubled}, strict=False, assign=True)

    assert_same_bits(layer(*read), replace(weight, **{name: doubled}).get_linear()(*read))


def test_a_module_that_was_moved_lets_go_of_what_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    held, own = list[Any](), KeptMatrix.__init__

    def noted(matrix: KeptMatrix, weight: Weight) -> None:
        held.append(weakref.ref(matrix))
        own(matrix, weight)

    monkeypatch.setattr(KeptMatrix, "__init__", noted)
    weight = made("mxfp4")
    layer = weight.get_linear()
    layer(*drawn(weight, 3))
    layer.to("cpu")
    gc.collect()

    assert held
    assert not any(matrix() for matrix in held)
