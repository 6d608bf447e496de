"""Experts of numbers in strips: exact sums, a bound, graphs with other experts, and inputs as declared."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import ExpertFacts, GatedActivation
from qload.kernels.activations import quantize
from qload.kernels.cuda import experts_launches, why_no_experts
from qload.kernels.cuda.experts_launches import gather_rows, sorted_pairs
from qload.kernels.declared import merge_parts
from qload.testing import assert_same_bits
from tests.gpu.expert_calls import WAYS, _fits, multiply
from tests.gpu.expert_layers import Experts, Gate, Tokens, drawn_numbers, tokens, typed_experts
from tests.gpu.layers import DTYPES
from tests.gpu.test_experts import Kind, assert_close, call, sums
from tests.gpu.test_quantize import SCHEMES

__all__ = ["_fits"]  # a fixture

pytestmark = pytest.mark.gpu
CLAMPED = Gate("clamped_swiglu", 1.702, 7.0)
TABLES = ("nf4", "fp4")
NAMES = ["channel", "block", "int8", "mxfp8", "nvfp4", "mxfp4", "nf4"]
PADDED = pytest.mark.parametrize("per", NAMES)
PER = pytest.mark.parametrize("per", [*NAMES, "fp4"])  # whose groups of 128 have no padding
MANY = pytest.mark.parametrize("M", [1, 8, 9, 33, 150])
LAYERS = pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"E": 4, "H": 256, "inner": 128}, id="whole"),
        pytest.param({"E": 5, "H": 1088, "inner": 320, "bias": True, "gate": CLAMPED}, id="half a chunk"),
        pytest.param({"E": 3, "H": 448, "inner": 192}, id="a half of columns"),
    ],
)


def close(held: Experts, chosen: Tokens, y: Tensor, per: str, way: str, weighs_inputs: bool = False) -> None:
    """Numbers are exact in 16 bits; a table's entries, scales and their products are rounded."""
    rounds = 3.1 if per in TABLES else 0.0
    assert_close(held, chosen, y, weighs_inputs, rounded=way == "many", weight_roundings=rounds)


@DTYPES
@PADDED
@MANY
@LAYERS
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_sums_are_exact_where_they_can_be(
    kind: Kind, M: int, per: str, dtype: torch.dtype, name: str
) -> None:
    held = drawn_numbers(**kind, per=per, dtype=dtype, exact=True)
    matrix = replace(getattr(held, name), bias=None)
    chosen = tokens(M, matrix.K, 2, kind["E"], dtype)
    made = call(replace(held, gate_up=matrix, down=matrix), replace_x(chosen), checked=False)
    w = held.dequantized(name)
    want = torch.einsum("mk,mtnk->mtn", made.x.double(), w[chosen.ids]).flatten(0, 1)

    assert_same_bits(sums(made, name, M).double() + 0, want + 0)
    assert_same_bits(many_sums(made, matrix) + 0, want.to(dtype) + 0)


def replace_x(chosen: Tokens) -> Tokens:
    """Small whole numbers as x."""
    return replace(chosen, x=(chosen.x * 2).round())


def many_sums(made: Any, matrix: Any) -> Tensor:
    """Sums of each pair, by the kernel of many tokens."""
    size = experts_launches.tokens_of_block(made)
    pairs = sorted_pairs(made, size, placed=True)
    x = gather_rows(made, matrix, made.x, made.top, made.pairs + size, pairs.order)
    y = experts_launches._product(made, pairs, matrix, x, None, size)
    assert pairs.places is not None
    return y[pairs.places.long()]


@DTYPES
@PADDED
@MANY
@LAYERS
@WAYS
def test_a_result_is_within_what_rounding_costs(
    kind: Kind, M: int, per: str, dtype: torch.dtype, way: str
) -> None:
    held = drawn_numbers(**kind, per=per, dtype=dtype)
    chosen = tokens(M, kind["H"], 2, kind["E"], dtype)

    y = multiply(held, chosen, way=way)

    close(held, chosen, y, per, way)
    some = slice(M // 2, None)
    assert_same_bits(multiply(held, chosen.rows(some), way=way), y[some])


@PER
@WAYS
def test_weights_on_the_input(per: str, way: str) -> None:
    held = drawn_numbers(6, 256, 384, per, bias=True)
    chosen = tokens(9, 256, 3, 6, torch.float16)

    y = multiply(held, chosen, weighs_inputs=True, way=way)

    close(held, chosen, y, per, way, weighs_inputs=True)


@PER
@WAYS
@pytest.mark.parametrize("M", [1, 40])
def test_one_expert_for_all_none_here_and_some_elsewhere(M: int, per: str, way: str) -> None:
    held = drawn_numbers(4, 256, 128, per)
    chosen = tokens(M, 256, 2, 4, torch.float16)
    alike = replace(chosen, ids=torch.tensor([[2, 1]], device="cuda").expand(M, 2).contiguous())
    close(held, alike, multiply(held, alike, way=way), per, way)
    nowhere = torch.full((4,), -1, device="cuda", dtype=torch.int32)
    assert_same_bits(multiply(held, chosen, way=way, expert_map=nowhere), torch.zeros_like(chosen.x))

    place = torch.tensor([-1, 3, -1, 0], device="cuda", dtype=torch.int32)  # as their numbers but one
    away = torch.where(place[chosen.ids] >= 0, chosen.weights, 0.0)
    moved = replace(chosen, ids=place[chosen.ids].clamp(0).long(), weights=away)
    assert_same_bits(
        multiply(held, chosen, way=way, expert_map=place) + 0, multiply(held, moved, way=way) + 0
    )


@PER
@WAYS
@pytest.mark.parametrize("M", [1, 40])
def test_a_graph_takes_other_experts_at_each_replay(M: int, per: str, way: str) -> None:
    held = drawn_numbers(8, 512, 256, per)
    own, others = (tokens(M, 512, 2, 8, torch.float16, seed) for seed in (0, 1))
    want = [multiply(held, each, way=way) for each in (own, others)]
    graph, read = torch.cuda.CUDAGraph(), Tokens(own.x.clone(), own.ids.clone(), own.weights.clone())
    with torch.cuda.graph(graph):
        y = multiply(held, read, way=way)

    for i in (1, 0, 1):
        for to, of in zip((read.x, read.ids, read.weights), _tensors((own, others)[i]), strict=True):
            to.copy_(of)
        y.fill_(torch.nan)
        graph.replay()
        assert_same_bits(y, want[i])


def _tensors(chosen: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    return chosen.x, chosen.ids, chosen.weights


DECLARED = {
    "fp8 group": "block",
    "fp8 token": "channel",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "int8 token": "int8",
    "int8 asymmetric": "int8",
    "fp8 static": "channel",
    "nvfp4": "nvfp4",
    "nvfp4 of modelopt": "nvfp4",
}


@DTYPES
@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize("M", [1, 9, 200])
def test_declared_inputs_are_rounded_ahead_of_both_products(
    M: int, side: Any, name: str, dtype: torch.dtype
) -> None:
    """Each input of down may fall to the code beside the exact one's."""
    scheme, per = SCHEMES[name], DECLARED[name]
    held = drawn_numbers(5, 512, 256, per, bias=True, dtype=dtype, gate=CLAMPED)
    facts = ExpertFacts(GatedActivation(CLAMPED.kind, CLAMPED.alpha, CLAMPED.limit), side)
    weight, chosen = typed_experts(held, facts, scheme=scheme), tokens(M, 512, 2, 5, dtype)
    stored = torch.tensor([0.0173, 0.3, 0.05, 1.0, 0.004], device="cuda")
    of_down = stored.flip(0)
    if scheme.scale:  # parts of gate and up have the same
        scales = {"gate_up": torch.stack([stored, stored], 1), "down": of_down[:, None]}
        stacks = [getattr(weight, name) for name in scales]
        made = [
            replace(each, tensors={**each.tensors, scheme.scale: scales[name]})
            for name, each in zip(scales, stacks, strict=True)
        ]
        weight = replace(weight, gate_up=merge_parts(made[0]), down=made[1])
    assert why_no_experts(weight, dtype, chosen.x.device, declared=True) is None

    y = weight.get_linear()(*_tensors(chosen))

    half = torch.finfo(dtype).eps / 2
    gate_up, down = held.dequantized("gate_up"), held.dequantized("down")
    want, slack = (torch.zeros(M, 512, device="cuda", dtype=torch.float64) for _ in range(2))
    for k in range(2):
        ids, routing = chosen.ids[:, k], chosen.weights[:, k, None]
        x = chosen.x.float() * routing if side == "input" else chosen.x
        own, step = numbers_of(x, scheme, stored[ids])
        dx = own.abs() * 2 * half
        if side == "input":  # which the kernel rounds to 16 bits first: another code may be the nearest
            dx += 2 * step + x.abs().double() * half
        both = torch.einsum("mk,mnk->mn", own, gate_up[ids]) + held.gate_up.bias[ids].double()  # type: ignore[index]
        size = torch.einsum("mk,mnk->mn", own.abs() + dx, gate_up[ids].abs())
        off = torch.einsum("mk,mnk->mn", dx, gate_up[ids].abs()) + size * 520 * 2.0**-24
        off += (both.abs() + off) * half
        (a, b), (da, db) = both.chunk(2, 1), off.chunk(2, 1)
        h = held.gate(a, b)
        dh = 1.13 * da * (b.abs() + db + 1) + a.abs() * db
        dh += (h.abs() + dh) * 2 * half
        code, step = numbers_of(h.float(), scheme, of_down[ids])
        _, wide = numbers_of((h.abs() + dh).float() * h.sign(), scheme, of_down[ids])
        dcode = dh + step + wide + (code.abs() + dh) * 2 * half
        out = torch.einsum("mk,mnk->mn", code, down[ids]) + held.down.bias[ids].double()  # type: ignore[index]
        reach = torch.einsum("mk,mnk->mn", dcode + code.abs() * 264 * 2.0**-24, down[ids].abs())
        reach += (out.abs() + reach) * half
        factor = 1.0 if side == "input" else routing.double()
        want, slack = want + out * factor, slack + reach * factor
    error, budget = (y.double() - want).abs(), slack + (want.abs() + slack) * 2 * half
    assert bool((error <= budget).all()), f"{(error / budget).max():g} of the bound"
    undeclared = weight.get_linear(activations="unquantized")(*_tensors(chosen))
    assert not torch.equal(undeclared, y)
    graph = torch.cuda.CUDAGraph()
    module = weight.get_linear()
    with torch.cuda.graph(graph):
        again = module(*_tensors(chosen))
    again.fill_(torch.nan)
    graph.replay()
    assert_same_bits(again, y)


def numbers_of(x: Tensor, scheme: Any, stored: Tensor) -> tuple[Tensor, Tensor]:
    """float64 values of the codes of x, by the stored scale of each row, and how far rounding can be off."""
    values, steps = [], []
    for row, own in zip(x.cpu(), stored.cpu(), strict=True):
        found = quantize(row[None], scheme, own)
        values.append(found.dequantize()[0])
        steps.append(found.steps.flatten().repeat_interleave(len(row) // found.steps.numel()))
    value, step = (torch.stack(each).double().cuda() for each in (values, steps))
    smallest, relative = {8: (2.0**-9, 2.0**-3), 4: (0.5, 0.5)}[scheme.bits]
    if scheme.type == "int":
        smallest, relative = 1.0, 0.0
    spacing = step * (value / step).abs().mul(relative).clamp_min(smallest)
    return value, spacing + (value - x.double()).abs()  # beyond the codes' range they saturate
