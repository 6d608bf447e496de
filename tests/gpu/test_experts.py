"""Tokens through the experts that they chose: exact sums, a bound, bits that no other token changes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.kernels.cuda import experts, experts_launches
from qload.kernels.cuda.experts_launches import GATES, ExpertsCall, ExpertsDivision, sorted_pairs, unsorted
from qload.testing import assert_same_bits
from tests.gpu.expert_calls import BITS, WAYS, _fits, multiply
from tests.gpu.expert_layers import Experts, Gate, Tokens, drawn, tokens
from tests.gpu.layers import DTYPES

__all__ = ["_fits"]  # a fixture

pytestmark = pytest.mark.gpu
Kind = dict[str, Any]
MANY = pytest.mark.parametrize("M", [1, 2, 7, 8, 9, 17, 64])
LAYERS = pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"E": 4, "H": 256, "inner": 128}, id="groups of 128"),
        pytest.param({"E": 8, "H": 1024, "inner": 384, "zeros": True}, id="groups of 128 with zero points"),
        pytest.param({"E": 5, "H": 384, "inner": 192, "group": 64, "zeros": True}, id="groups of 64"),
        pytest.param(
            {"E": 5, "H": 896, "inner": 192, "group": 32, "bias": True}, id="groups of 32 and a bias"
        ),
        pytest.param({"E": 7, "H": 1664, "inner": 320, "group": -1, "zeros": True}, id="one scale a column"),
        pytest.param({"E": 3, "H": 200, "inner": 104, "group": 32, "zeros": True, "bias": True}, id="padded"),
        pytest.param({"E": 6, "H": 384, "inner": 256, "act_order": True, "zeros": True}, id="act order"),
        pytest.param({"E": 6, "H": 88, "inner": 72, "group": 32, "act_order": True}, id="padded act order"),
    ],
)


def call(held: Experts, chosen: Tokens, *, checked: bool = True, **options: Any) -> ExpertsCall:
    """As the operator makes it; `checked`: both matrices fit x."""
    gate = GATES[held.gate.kind], held.gate.alpha, held.gate.limit
    weighs = options.pop("weighs_inputs", False)
    read = chosen.x, chosen.ids, chosen.weights, options.pop("expert_map", None)
    made = ExpertsCall(*read, held.gate_up, held.down, gate, weighs)
    if checked:
        experts.check(made)
    return made


def assert_close(
    held: Experts,
    chosen: Tokens,
    y: Tensor,
    weighs_inputs: bool = False,
    rounded: bool = False,
    weight_roundings: float | None = None,
) -> None:
    """|y - exact| is at most what sums in float32, the functions between and each rounding can cost.

    A sum of K products is off by (K + 4) 2**-24 of the sum of their sizes; silu, gelu and sigmoid times their
    argument are steeper than 1.13 nowhere, and off by less than 16 * 2**-24 of |gate up|. `rounded`: weights,
    weighted inputs, gate, up and what down makes of them are rounded too. `weight_roundings`: of a weight, if
    not one where `rounded`.
    """
    unit, output = 2.0**-24, torch.finfo(chosen.x.dtype)
    half = output.eps / 2 if rounded else 0.0
    weighed = 1.1 * half if rounded and weighs_inputs else 0.0
    of_weights = half if weight_roundings is None else weight_roundings * output.eps / 2
    gate_up, down = held.dequantized("gate_up"), held.dequantized("down")
    x, weights = chosen.x.double(), chosen.weights.double()
    want, slack = torch.zeros_like(x), torch.zeros_like(x)
    for k in range(chosen.ids.shape[1]):
        ids, weight = chosen.ids[:, k], weights[:, k, None]
        factor, weight = (
            (weight, torch.ones_like(weight)) if weighs_inputs else (torch.ones_like(weight), weight)
        )
        both, size = _product(x * factor, gate_up[ids], held.gate_up.bias, ids)
        off = size * ((x.shape[1] + 4) * unit + weighed + of_weights) + both.abs() * half
        (a, b), (da, db) = both.chunk(2, 1), off.chunk(2, 1)
        others = b.abs() + db + (1 if held.gate.kind == "clamped_swiglu" else 0)
        h = held.gate(a, b)
        dh = 1.13 * da * others + a.abs() * db + 16 * unit * (a.abs() + da) * others
        dh += (h.abs() + dh) * output.eps / 2 + output.tiny
        out, size = _product(h, down[ids], held.down.bias, ids)
        reach = torch.einsum("mk,mnk->mn", dh, down[ids].abs())
        reach += (size + reach) * ((h.shape[1] + 4) * unit + of_weights)
        reach += (out.abs() + reach) * (half + (chosen.ids.shape[1] + 2) * unit)
        want, slack = want + out * weight, slack + reach * weight
    budget = slack + (want.abs() + slack) * output.eps / 2 + output.tiny
    error = (y.double() - want).abs()
    assert bool((error <= budget).all()), f"off by {(error / budget).max():g} of what rounding can cost"


def _product(x: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor) -> tuple[Tensor, Tensor]:
    """float64 x (M, K) times each one's w (M, N, K), and the sum of sizes."""
    exact, size = torch.einsum("mk,mnk->mn", x, w), torch.einsum("mk,mnk->mn", x.abs(), w.abs())
    added = 0.0 if bias is None else bias.double()[ids]
    return exact + added, size + abs(added)


def sums(made: ExpertsCall, name: str, M: int) -> Tensor:
    """float32 (pairs, N) of one matrix, of x as it is."""
    pairs = unsorted(made) if M == 1 else sorted_pairs(made, experts_launches.turn(made))
    matrix = getattr(made, name)
    inputs = experts_launches.in_order(made, matrix, made.x, made.top)
    return experts_launches.product(made, pairs, matrix, inputs)


@DTYPES
@BITS
@MANY
@LAYERS
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_sums_are_exact_where_they_can_be(
    kind: Kind, M: int, bits: int, dtype: torch.dtype, name: str
) -> None:
    held = drawn(**kind, bits=bits, dtype=dtype, exact=True)
    matrix = getattr(held, name)
    chosen = tokens(M, matrix.K, 2, kind["E"], dtype)
    x = (chosen.x * 2).round()
    made = ExpertsCall(x, chosen.ids, chosen.weights, None, held.gate_up, held.down, (0, 0.0, 0.0), False)

    got = sums(made, name, M)

    want = torch.einsum("mk,mtnk->mtn", x.double(), held.dequantized(name)[chosen.ids])
    if matrix.bias is not None:
        want += matrix.bias.double()[chosen.ids]
        torch.testing.assert_close(got.double(), want.flatten(0, 1), rtol=2.0**-24, atol=0)
    else:
        assert_same_bits(got.double(), want.flatten(0, 1))


@DTYPES
@BITS
@MANY
@LAYERS
@WAYS
def test_a_result_is_within_what_rounding_costs(
    kind: Kind, M: int, bits: int, dtype: torch.dtype, way: str
) -> None:
    held = drawn(**kind, bits=bits, dtype=dtype)
    chosen = tokens(M, kind["H"], 2, kind["E"], dtype)

    assert_close(held, chosen, multiply(held, chosen, way=way), rounded=way == "many")


@pytest.mark.parametrize(
    "gate",
    [Gate("silu"), Gate("gelu"), Gate("gelu_tanh"), Gate("clamped_swiglu", 1.702, 7.0)],
    ids=lambda gate: gate.kind,
)
@pytest.mark.parametrize("inner", [192, 104], ids=["in one pass", "after it"])
@pytest.mark.parametrize("weighs_inputs", [False, True], ids=["output", "input"])
@WAYS
def test_every_activation_and_side_of_the_weights(
    gate: Gate, inner: int, weighs_inputs: bool, way: str
) -> None:
    held = drawn(6, 256, inner, 32, True, bias=True, gate=gate)
    chosen = tokens(9, 256, 3, 6, torch.float16)

    y = multiply(held, chosen, weighs_inputs=weighs_inputs, way=way)

    assert_close(held, chosen, y, weighs_inputs, way == "many")


@BITS
@pytest.mark.parametrize("turn", [8, 16])
@pytest.mark.parametrize(("columns", "rows"), [(2, 1), (2, 3), (2, 5), (2, 6), (1, 12), (3, 4), (4, 3)])
def test_every_division_sums_exactly(
    columns: int, rows: int, turn: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_launches, "division", lambda *layer: ExpertsDivision(columns, rows))
    monkeypatch.setattr(experts_launches, "turn", lambda call: turn)
    held = drawn(3, 1664, 160, 64, True, bits=bits, exact=True)
    chosen = tokens(31, 1664, 2, 3, torch.float16)
    made = call(held, Tokens(chosen.x.round(), chosen.ids, chosen.weights))

    want = torch.einsum("mk,mtnk->mtn", made.x.double(), held.dequantized("gate_up")[chosen.ids])

    assert_same_bits(sums(made, "gate_up", 31).double(), want.flatten(0, 1))


@DTYPES
@BITS
@LAYERS
@WAYS
def test_no_other_token_changes_a_bit(kind: Kind, bits: int, dtype: torch.dtype, way: str) -> None:
    held = drawn(**kind, bits=bits, dtype=dtype)
    chosen = tokens(100, kind["H"], 2, kind["E"], dtype)
    want = multiply(held, chosen, way=way)

    for rows in ([0], [99], list(range(8)), list(range(50, 67)), list(range(99, -1, -1)), [3] * 20):
        assert_same_bits(multiply(held, chosen.rows(rows), way=way), want[rows])


@WAYS
def test_one_expert_for_all(way: str) -> None:
    held = drawn(4, 256, 128, zeros=True)
    chosen = tokens(140, 256, 2, 4, torch.float16)
    all_alike = Tokens(
        chosen.x, torch.tensor([[2, 1]], device="cuda").expand(140, 2).contiguous(), chosen.weights
    )

    y = multiply(held, all_alike, way=way)

    assert_close(held, all_alike, y, rounded=way == "many")
    assert_same_bits(multiply(held, all_alike.rows([139]), way=way), y[139:])


@pytest.mark.parametrize("M", [1, 5, 33])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=["int32", "int64"])
@WAYS
def test_experts_elsewhere_add_nothing(M: int, ids: torch.dtype, way: str) -> None:
    held, chosen = drawn(8, 256, 192, 64), tokens(M, 256, 3, 8, torch.float16)
    place = torch.tensor([-1, 2, -1, 0, -1, 1, -1, 3], device="cuda", dtype=torch.int32)
    here = (place >= 0).nonzero().flatten()
    order = here[place[here].argsort()]
    share = Experts(*(_part(each, order) for each in (held.gate_up, held.down)))
    weights = torch.where(place[chosen.ids] >= 0, chosen.weights, 0.0)

    got = multiply(share, Tokens(chosen.x, chosen.ids.to(ids), chosen.weights), expert_map=place, way=way)

    assert_same_bits(got, multiply(held, Tokens(chosen.x, chosen.ids, weights), way=way))


def _part(matrix: Any, experts_here: Tensor) -> Any:
    held = {name: getattr(matrix, name) for name in ("weights", "scales", "zeros", "perm", "bias")}
    cut = {
        name: None if tensor is None else tensor[experts_here].contiguous() for name, tensor in held.items()
    }
    return type(matrix)(**cut, N=matrix.N, K=matrix.K, code=matrix.code, group_size=matrix.group_size)


@pytest.mark.parametrize("M", [1, 6])
@WAYS
def test_a_number_of_no_expert_makes_its_token_nan_and_no_other(M: int, way: str) -> None:
    held, chosen = drawn(4, 256, 128), tokens(M, 256, 2, 4, torch.float16)
    want = multiply(held, chosen, way=way)
    for number in (-1, 4, 2**31 - 1, 2**40, -(2**63)):
        ids = chosen.ids.clone()
        ids[M - 1, 1] = number

        got = multiply(held, Tokens(chosen.x, ids, chosen.weights), way=way)

        assert bool(got[M - 1].isnan().all())
        assert_same_bits(got[: M - 1], want[: M - 1])


@WAYS
def test_experts_that_are_all_elsewhere_add_nothing(way: str) -> None:
    held, chosen = drawn(4, 256, 128), tokens(6, 256, 2, 4, torch.float16)
    nowhere = torch.full((4,), -1, device="cuda", dtype=torch.int32)

    y = multiply(held, chosen, way=way, expert_map=nowhere)

    assert_same_bits(y, torch.zeros_like(y))


@pytest.mark.parametrize("M", [1, 9, 64])
@WAYS
def test_only_the_rows_of_a_token_reach_it(M: int, way: str) -> None:
    held, chosen = drawn(8, 384, 192, 64), tokens(M, 384, 2, 8, torch.float16)
    memory = torch.full((M + 2, 384), torch.nan, device="cuda", dtype=torch.float16)
    memory[1:-1] = chosen.x

    got = multiply(held, Tokens(memory[1:-1], chosen.ids, chosen.weights), way=way)

    assert_same_bits(got, multiply(held, chosen, way=way))


@pytest.mark.parametrize("M", [1, 9])
@WAYS
def test_a_token_of_nan_reaches_no_other(M: int, way: str) -> None:
    held, chosen = drawn(4, 384, 192, 64), tokens(M + 1, 384, 2, 4, torch.float16)
    want = multiply(held, chosen, way=way)
    chosen.x[-1] = torch.nan

    got = multiply(held, chosen, way=way)

    assert_same_bits(got[:-1], want[:-1])
    assert bool(got[-1].isnan().all())
