"""Tokens through experts by launches of the CUDA module, its routines computed by hand on CPU tensors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import ExpertFacts, ExpertsWeight, GatedActivation, LocalExperts
from qload.errors import ArgumentError
from qload.kernels.activations import quantize
from qload.kernels.cuda import experts, experts_launches, module
from qload.kernels.experts_function import experts as experts_of
from qload.spec import ActivationScheme
from tests.gpu.expert_layers import Experts, Gate, Tokens, drawn, drawn_numbers, typed_experts
from tests.kernels.cuda_experts import ALL, LAST, WHOLE, HandOfExperts
from tests.kernels.cuda_layers import AMPERE, HOPPER, installed, on_cpu

HALF, BF16, CUDA = torch.float16, torch.bfloat16, torch.device("cuda")
WAYS = pytest.mark.parametrize("way", experts.WAYS)
CLAMPED = Gate("clamped_swiglu", 1.5, 40.0)
LAYERS = {  # and the mapping of experts, and whether gate and up are one in the kernel of few tokens
    "groups of 128": ({"E": 3, "H": 256, "inner": 128}, None, True),
    "8 bits, zero points, one scale a column": (
        {"E": 2, "H": 128, "inner": 192, "group": -1, "zeros": True, "bits": 8, "dtype": BF16}, None, True,
    ),
    "a bias, elsewhere": ({"E": 2, "H": 256, "inner": 64, "group": 64, "bias": True}, [1, -1, 0, -1], True),
    "padded": (
        {"E": 3, "H": 104, "inner": 72, "group": 32, "zeros": True, "bias": True, "gate": CLAMPED},
        None, False,
    ),
    "act order": ({"E": 2, "H": 128, "inner": 256, "act_order": True}, [-1, 1, 0], True),
    "padded act order": ({"E": 3, "H": 88, "inner": 72, "group": 32, "act_order": True}, None, False),
    "gelu, one padded": ({"E": 2, "H": 128, "inner": 64, "gate": Gate("gelu")}, None, True),
    "gelu by tanh": ({"E": 2, "H": 128, "inner": 128, "gate": Gate("gelu_tanh")}, None, True),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    with on_cpu({"experts": experts._experts}):
        yield


@pytest.fixture
def chip() -> tuple[int, int]:
    return HOPPER


@pytest.fixture
def hand(chip: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> HandOfExperts:
    return installed(HandOfExperts(chip), monkeypatch)


def tokens(M: int, H: int, top: int, total: int, dtype: torch.dtype) -> Tokens:
    """Small whole numbers, unequal experts, and powers of two as weights."""
    make = torch.Generator().manual_seed(M + H)
    ids = torch.rand(M, total, generator=make).topk(top).indices
    weights = 2.0 ** -torch.randint(0, 3, (M, top), generator=make)
    return Tokens(torch.randint(-2, 3, (M, H), generator=make).to(dtype), ids, weights)


def want(
    held: Experts, chosen: Tokens, places: list[int], weighs_inputs: bool, way: str, is_one: bool
) -> Tensor:
    """The formula in float64, rounded where a way rounds."""
    dtype, weights = chosen.x.dtype, chosen.weights.double()
    sums = dtype if way == "many" else torch.float32
    total = torch.zeros(chosen.x.shape, dtype=torch.float64)
    matrices = {name: held.dequantized(name) for name in ("gate_up", "down")}
    for m, k in torch.cartesian_prod(*map(torch.arange, chosen.ids.shape)).tolist():
        place = places[int(chosen.ids[m, k])]
        if place < 0:
            continue
        x = chosen.x[m].double() * (weights[m, k] if weighs_inputs else 1)
        both = matrices["gate_up"][place] @ x
        both = both if held.gate_up.bias is None else both + held.gate_up.bias[place].double()
        both = both if way == "few" and is_one else both.to(sums).double()
        between = held.gate(*both.chunk(2)).to(dtype).double()
        out = matrices["down"][place] @ between
        out = out if held.down.bias is None else out + held.down.bias[place].double()
        total[m] += out.to(sums).double() * (1 if weighs_inputs else weights[m, k])
    return total.to(dtype)


@WAYS
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("M", "weighs_inputs"), [(1, False), (3, True), (33, False)])
def test_tokens_go_through_the_experts_that_they_chose(
    hand: HandOfExperts, name: str, M: int, weighs_inputs: bool, way: str
) -> None:
    kind, places, is_one = LAYERS[name]
    held, at = drawn(**kind, exact=True, device="cpu"), places or [*range(kind["E"])]
    chosen = tokens(M, kind["H"], 2, len(at), held.gate_up.scales.dtype)
    options = {**held.gate.options, "weighs_inputs": weighs_inputs, "way": way, "early": M != 3}
    local = None if places is None else torch.tensor(places, dtype=torch.int32)
    ids = chosen.ids.to(torch.int32) if M == 3 else chosen.ids
    x = torch.cat([torch.zeros(1).to(chosen.x.dtype), chosen.x.flatten()])[1:].view(chosen.x.shape)

    y = experts.multiply(
        x if way == "many" else chosen.x, ids.T.contiguous().T, chosen.weights, held.gate_up, held.down,
        expert_map=local, **options,
    )  # fmt: skip

    assert y.dtype == chosen.x.dtype
    assert torch.equal(y, want(held, chosen, at, weighs_inputs, way, is_one))
    assert {early for name, early, _ in hand.launches if name != "sort"} == {M != 3}


NUMBERS = {  # and whether gate and up are one in the kernel of few tokens
    "channel": ({"E": 3, "H": 128, "inner": 64}, True),
    "block": ({"E": 3, "H": 256, "inner": 192, "bias": True, "dtype": BF16}, True),
    "int8": ({"E": 2, "H": 104, "inner": 72, "bias": True}, False),
    "mxfp8": ({"E": 2, "H": 96, "inner": 128, "gate": CLAMPED}, True),
    "nvfp4": ({"E": 3, "H": 80, "inner": 96, "gate": CLAMPED}, False),
    "mxfp4": ({"E": 3, "H": 160, "inner": 64, "bias": True, "gate": CLAMPED, "dtype": BF16}, True),
    "nf4": ({"E": 2, "H": 192, "inner": 64}, True),
    "fp4": ({"E": 2, "H": 128, "inner": 128, "gate": CLAMPED}, True),
}


@WAYS
@pytest.mark.parametrize("per", NUMBERS)
@pytest.mark.parametrize(("M", "weighs_inputs"), [(1, False), (3, True), (33, False)])
def test_tokens_go_through_experts_of_numbers(
    hand: HandOfExperts, per: str, M: int, weighs_inputs: bool, way: str
) -> None:
    kind, is_one = NUMBERS[per]
    held = drawn_numbers(**kind, per=per, exact=True, device="cpu")
    chosen = tokens(M, kind["H"], 2, kind["E"], kind.get("dtype", HALF))
    read = chosen.x, chosen.ids, chosen.weights, held.gate_up, held.down

    y = experts.multiply(*read, **held.gate.options, weighs_inputs=weighs_inputs, way=way)

    assert torch.equal(y, want(held, chosen, [*range(kind["E"])], weighs_inputs, way, is_one))


SCHEMES = {
    "a scale a token": ("channel", ActivationScheme("float", 8, True, "token")),
    "scales of groups": ("block", ActivationScheme("float", 8, True, "group", 128)),
    "powers of two": ("mxfp4", ActivationScheme("float", 8, True, "group", 32, scale_type="e8m0")),
    "zero points": ("int8", ActivationScheme("int", 8, True, "token", symmetric=False)),
    "a stored scale": ("channel", ActivationScheme("float", 8, False, "tensor", scale="input_scale")),
    "stored and found scales": (
        "nvfp4", ActivationScheme(
            "float", 4, "local", "tensor_group", 16, scale="input_scale", scale_type="e4m3", owner="modelopt"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize("M", [1, 3, 12])
def test_declared_inputs_of_experts_are_rounded_by_launches(
    hand: HandOfExperts, M: int, side: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    per, scheme = SCHEMES[name]
    held = drawn_numbers(3, 256, 128, per, exact=True, device="cpu", gate=CLAMPED)
    facts = ExpertFacts(GatedActivation(CLAMPED.kind, CLAMPED.alpha, CLAMPED.limit), side)
    typed, chosen = typed_experts(held, facts, scheme=scheme), tokens(M, 256, 2, 3, HALF)
    rounded, read = list[Tensor](), experts_launches.Rounding.__call__

    def listed(rounding: Any, matrix: int, x: Tensor) -> Any:
        rounded.append(x)
        return read(rounding, matrix, x)

    monkeypatch.setattr(experts_launches.Rounding, "__call__", listed)
    of_gate_up, of_down = (
        torch.tensor([0.03, 0.5, 2.0]),
        torch.tensor([0.7, 0.09, 0.25]),
    )  # where they are read
    if scheme.scale:
        gate_up, down = (
            replace(stack, tensors={**stack.tensors, scheme.scale: stored})
            for stack, stored in ((typed.gate_up, of_gate_up), (typed.down, of_down))
        )
        typed = replace(typed, gate_up=gate_up, down=down)

    y = experts.experts_linear(chosen.x, chosen.ids, chosen.weights, typed, declared=True)

    few = M < 12
    rows = 2 * M if few else 2 * M + 32
    assert hand.called.count("quantize") == 2
    alike = few and side == "output" and not scheme.scale  # pairs of a token are
    assert [len(x) for x in rounded] == [M if alike else rows, rows]
    between = torch.empty(2 * M, 128, dtype=HALF)
    between[torch.arange(2 * M) if few else chosen.ids.flatten().argsort(stable=True)] = rounded[1][: 2 * M]
    w_gate_up, w_down = held.dequantized("gate_up"), held.dequantized("down")
    eps, tiny = torch.finfo(HALF).eps, torch.finfo(HALF).smallest_normal
    total, slack = torch.zeros(2, M, 256, dtype=torch.float64)
    for m, k in torch.cartesian_prod(torch.arange(M), torch.arange(2)).tolist():
        e, routing, own = int(chosen.ids[m, k]), chosen.weights[m, k], between[2 * m + k]
        x = (chosen.x[m] * routing).to(HALF) if side == "input" else chosen.x[m]
        both = w_gate_up[e] @ quantize(x[None], scheme, of_gate_up[e]).dequantize()[0].double()
        h = held.gate(*both.chunk(2))
        reach = 2 * eps * (both.abs().chunk(2)[0] + 1) * (both.abs().chunk(2)[1] + 1) + tiny
        assert bool(((own.double() - h).abs() <= reach).all())  # one rounding, or three
        q = quantize(own[None], scheme, of_down[e]).dequantize()[0].double()
        factor = 1 if side == "input" else float(routing)
        total[m] += w_down[e] @ q * factor
        slack[m] += w_down[e].abs() @ q.abs() * eps * factor
    assert bool(((y.double() - total).abs() <= slack + total.abs() * eps + tiny).all())


STATIC = ActivationScheme("float", 8, False, "tensor", scale="input_scale")


def with_input_scales(typed: ExpertsWeight, *parts: Tensor) -> ExpertsWeight:
    """Stored scales (E,) of each part of gate and up; down has those of the first."""
    stacks = [
        replace(stack, tensors={**stack.tensors, "input_scale": scales})
        for stack, scales in ((typed.gate_up, torch.stack(parts, 1)), (typed.down, parts[0][:, None]))
    ]
    return replace(typed, gate_up=stacks[0], down=stacks[1])


@pytest.mark.parametrize("activations", ["declared", "unquantized"])
def test_equal_stored_scales_of_gate_and_up_become_one(activations: Any) -> None:
    typed = typed_experts(drawn_numbers(3, 128, 64, "channel", device="cpu"), scheme=STATIC)
    stored = torch.tensor([0.25, 0.5, 2.0])
    alike, apart = with_input_scales(typed, stored, stored), with_input_scales(typed, stored, stored * 3)
    modules: list[Any] = [each.get_linear(activations=activations) for each in (alike, apart)]

    merged = activations == "declared"
    made = [module.typed.gate_up.tensors["input_scale"] for module in modules]
    assert [tuple(each.shape) for each in made] == [(3, 1) if merged else (3, 2), (3, 2)]
    assert torch.equal(made[0][:, 0], stored)
    make = torch.Generator().manual_seed(0)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [1, 0], [2, 1]])
    read = torch.randn(5, 128, generator=make), ids, torch.rand(5, 2, generator=make)
    if merged:
        assert torch.equal(modules[0](*read), experts_of(*read, alike))
        assert not torch.equal(modules[0](*read), experts_of(*read, apart))


def launched(held: Experts, M: int, hand: HandOfExperts, top: int = 2, **options: Any) -> list[Any]:
    """Names of the launches of a call, and how products are divided."""
    dtype = held.gate_up.scales.dtype
    chosen = tokens(M, held.gate_up.K, top, held.down.experts, dtype)
    experts.multiply(chosen.x, chosen.ids, chosen.weights, held.gate_up, held.down, **options)
    return [(name, division) if division else name for name, _, division in hand.launches]


def test_one_token_is_sorted_by_nobody(hand: HandOfExperts) -> None:
    held = drawn(3, 256, 128, device="cpu")

    assert launched(held, 1, hand) == [("unknown", (8, 2, 6)), ("known", (8, 1, 12)), "combine"]


@pytest.mark.parametrize(("M", "turn"), [(18, 8), (19, 16)])
def test_a_second_read_of_an_expert_takes_longer_than_a_block_of_16(
    hand: HandOfExperts, M: int, turn: int
) -> None:
    held = drawn(3, 128, 64, device="cpu")

    assert launched(held, M, hand, way="few")[0] == ("sort", (turn,))


@pytest.mark.parametrize(
    ("M", "tokens_of_block"), [(38, 32), (39, 64), (76, 64), (77, 128), (400, 128)], ids=str
)
def test_a_block_of_many_has_the_tokens_of_an_expert_and_a_quarter_more(
    hand: HandOfExperts, M: int, tokens_of_block: int
) -> None:
    held = drawn(3, 128, 64, device="cpu")
    columns = 256 if tokens_of_block == 128 else 512

    assert launched(held, M, hand, way="many") == [
        ("sort", (tokens_of_block,)),
        "gather",
        ("many", (tokens_of_block, columns, False, ALL if columns == 256 else WHOLE)),
        *([("many", (tokens_of_block, 256, False, LAST))] if columns == 512 else []),
        "gate",
        ("many", (tokens_of_block, columns, False, ALL if columns == 256 else WHOLE)),
        *([("many", (tokens_of_block, 256, False, LAST))] if columns == 512 else []),
        "combine",
    ]


@pytest.mark.parametrize(
    ("H", "top", "how"),
    [
        (11200, 1, ("known", (8, 1, 12))),  # 87 pairs of tiles
        (11264, 1, ("known", (8, 1, 3))),
        (5632, 2, ("known", (8, 1, 3))),
    ],
)
def test_fewer_columns_of_a_token_are_shared_by_more_warps(
    hand: HandOfExperts, H: int, top: int, how: Any
) -> None:
    held = drawn(2, H, 64, device="cpu")

    assert launched(held, 1, hand, top=top)[-2] == how


def test_the_fastest_way_is_the_default(hand: HandOfExperts) -> None:
    held = drawn(2, 128, 64, device="cpu")

    assert launched(held, 7, hand, top=2)[-2][0] == "known"
    hand.launches.clear()
    assert launched(held, 8, hand, top=2)[-2][0] == "many"


@WAYS
def test_an_id_of_no_expert_spoils_its_token_alone(hand: HandOfExperts, way: str) -> None:
    held, chosen = drawn(3, 128, 64, device="cpu"), tokens(4, 128, 2, 3, HALF)
    for token, id_ in ((1, 3), (2, -1)):
        chosen.ids[token, 0] = id_

    y = experts.multiply(chosen.x, chosen.ids, chosen.weights, held.gate_up, held.down, way=way)

    assert y.isnan().all(1).tolist() == [False, True, True, False]
    assert y.isnan().any(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize(("M", "top", "H"), [(0, 2, 128), (3, 0, 128), (3, 2, 0)])
def test_nothing_chosen_is_nothing(hand: HandOfExperts, M: int, top: int, H: int) -> None:
    held = drawn(2, 128, 64, device="cpu")
    held = replace(held, gate_up=replace(held.gate_up, K=H), down=replace(held.down, N=H))
    ids = torch.zeros(M, top, dtype=torch.int64)

    y = experts.multiply(torch.ones(M, H).half(), ids, ids.float(), held.gate_up, held.down)

    assert torch.equal(y, torch.zeros(M, H).half())
    assert not hand.launches


LAYER = drawn(2, 128, 64, 32, zeros=True, bias=True, act_order=True, device="cpu")
GATE_UP, DOWN = LAYER.gate_up, LAYER.down
CHOSEN = tokens(3, 128, 2, 2, HALF)
GROUPS = (
    "4 bits with groups of (-1, 32, 64, 128) or 8 bits with groups of (-1, 32, 64, 128) or int8 with groups "
    "of (-1,) or e2m1 with groups of (16, 32) or mxfp8 with groups of (32,) or e4m3fn with groups of (-1, "
    "128) or nf4 with groups of (64, 128) or fp4 with groups of (64, 128)"
)
MORE = "as many experts as gate_up, at most 4096"
MANY = torch.empty(4097, 0, 0, dtype=torch.int32)
NONE = {"zeros": None, "perm": None, "bias": None, "scales": torch.empty(4097, 0, 0).half(), "weights": MANY}


def odd(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


REFUSED = [
    ({"topk_ids": CHOSEN.ids[:2]}, "topk_ids", "(M, top) for x (3, 128)", "(2, 2)"),
    ({"topk_ids": CHOSEN.ids[0]}, "topk_ids", "(M, top) for x (3, 128)", "(2,)"),
    ({"x": CHOSEN.x[None]}, "topk_ids", "(M, top) for x (1, 3, 128)", "(3, 2)"),
    ({"topk_ids": CHOSEN.ids.short()}, "topk_ids", "torch.int32 or torch.int64", "torch.int16"),
    ({"x": CHOSEN.x.float()}, "x", "torch.float16 or torch.bfloat16", "torch.float32"),
    ({"topk_weights": CHOSEN.weights[:, :1]}, "topk_weights", "shape (3, 2)", "(3, 1)"),
    (
        {"topk_weights": CHOSEN.weights.double()},
        "topk_weights",
        "torch.float32 or torch.float16 or torch.bfloat16",
        "torch.float64",
    ),
    ({"expert_map": torch.zeros(2)}, "expert_map", "torch.int32", "torch.float32"),
    ({"activation": "relu"}, "activation", "silu or gelu or gelu_tanh or clamped_swiglu", "'relu'"),
    ({"way": "other"}, "way", "few or many", "'other'"),
    ({"gate_up": replace(GATE_UP, code=3)}, "gate_up.group_size", GROUPS, "3 bits with groups of 32"),
    ({"down": replace(DOWN, group_size=16)}, "down.group_size", GROUPS, "4 bits with groups of 16"),
    (
        {"gate_up": replace(GATE_UP, weights=GATE_UP.weights[0])},
        "gate_up.weights",
        "(E, N / 64, K * 8), K of whole groups of 128",
        "(2, 1024)",
    ),
    (
        {"gate_up": replace(GATE_UP, weights=GATE_UP.weights[..., :512])},
        "gate_up.weights",
        "(E, N / 64, K * 8), K of whole groups of 128",
        "(2, 2, 512)",
    ),
    ({"x": torch.ones(3, 129).half()}, "gate_up.weights", "at least 128 x 129", "128 x 128"),
    ({"down": replace(DOWN, K=65)}, "gate_up.weights", "at least 130 x 128", "128 x 128"),
    (
        {"gate_up": replace(GATE_UP, weights=GATE_UP.weights.float())},
        "gate_up.weights",
        "torch.int32",
        "torch.float32",
    ),
    (
        {"gate_up": replace(GATE_UP, scales=GATE_UP.scales[:, :3])},
        "gate_up.scales",
        "contiguous, on cpu",
        "strides (512, 128, 1), on cpu",
    ),
    (
        {"gate_up": replace(GATE_UP, scales=GATE_UP.scales[:, :3].contiguous())},
        "gate_up.scales",
        "shape (2, 4, 128)",
        "(2, 3, 128)",
    ),
    (
        {"down": replace(DOWN, scales=DOWN.scales.bfloat16())},
        "down.scales",
        "torch.float16",
        "torch.bfloat16",
    ),
    (
        {"down": replace(DOWN, zeros=DOWN.zeros[..., :8].contiguous())},
        "down.zeros",
        "shape (2, 4, 16)",  # type: ignore[index]
        "(2, 4, 8)",
    ),
    ({"down": replace(DOWN, perm=DOWN.perm[:, :64].contiguous())}, "down.perm", "shape (2, 128)", "(2, 64)"),  # type: ignore[index]
    ({"down": replace(DOWN, bias=DOWN.bias.float())}, "down.bias", "torch.float16", "torch.float32"),  # type: ignore[union-attr]
    ({"gate_up": replace(GATE_UP, bias=GATE_UP.bias[:1])}, "gate_up.bias", "shape (2, 128)", "(1, 128)"),  # type: ignore[index]
    (
        {"gate_up": replace(GATE_UP, scales=odd(GATE_UP.scales))},
        "gate_up.scales",
        "memory from a multiple of 16 bytes on",
        "another place",
    ),
    (
        {"down": replace(DOWN, weights=odd(DOWN.weights))},
        "down.weights",
        "memory from a multiple of 16 bytes on",
        "another place",
    ),
    (
        {"down": replace(DOWN, zeros=odd(DOWN.zeros))},
        "down.zeros",
        "memory from a multiple of 16 bytes on",
        "another place",
    ),
    ({"down": drawn(3, 128, 64, 32, device="cpu").down}, "down", MORE, "2 and 3"),
]


@pytest.mark.parametrize(("changed", "argument", "expected", "got"), REFUSED)
def test_operands_that_do_not_fit_are_refused(
    hand: HandOfExperts, changed: Any, argument: str, expected: str, got: str
) -> None:
    read: dict[str, Any] = {
        "x": CHOSEN.x,
        "topk_ids": CHOSEN.ids,
        "topk_weights": CHOSEN.weights,
        "gate_up": GATE_UP,
        "down": DOWN,
    }

    with pytest.raises(ArgumentError) as error:
        experts.multiply(**{**read, **changed})

    assert (error.value.argument, error.value.expected, error.value.got) == (argument, expected, got)
    assert not hand.launches


def test_more_experts_than_the_kernel_counts_are_refused(hand: HandOfExperts) -> None:
    matrix = drawn(1, 128, 64, device="cpu").gate_up
    many = [
        replace(
            matrix,
            weights=matrix.weights.expand(E, -1, -1)[:, :0].contiguous(),
            N=0,
            scales=torch.empty(E, 1, 0).half(),
        )
        for E in (4096, 4097)
    ]
    x, ids = torch.ones(1, 128).half(), torch.zeros(1, 1, dtype=torch.int64)

    calls = [
        experts.ExpertsCall(x, ids, ids.float(), None, each, each, (0, 0.0, 0.0), False) for each in many
    ]

    experts.check(calls[0])
    with pytest.raises(ArgumentError, match=r"at most 4096\n +got +4097 and 4097"):
        experts.check(calls[1])


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("kind", ["a bias, elsewhere", "padded", "act order"])
def test_a_typed_weight_is_what_the_operator_reads(hand: HandOfExperts, kind: str, side: Any) -> None:
    kinds, places, is_one = LAYERS[kind]
    held = drawn(**kinds, exact=True, device="cpu")
    activation = GatedActivation("clamped_swiglu", 1.5, 40.0) if kind == "padded" else GatedActivation("silu")
    local = LocalExperts(1, 1 + kinds["E"], 4) if places else None
    at = [-1, *range(kinds["E"]), *[-1] * (3 - kinds["E"])] if places else [*range(kinds["E"])]
    chosen, typed = (
        tokens(6, kinds["H"], 2, len(at), HALF),
        typed_experts(held, ExpertFacts(activation, side), local),
    )

    y = experts.experts_linear(chosen.x.view(2, 3, -1), chosen.ids, chosen.weights, typed)

    way = "few" if kind == "act order" else "many"  # of small groups from two pairs of an expert on
    assert torch.equal(y.flatten(0, 1), want(held, chosen, at, side == "input", way, is_one))


def test_reasons_against_the_kernel(hand: HandOfExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_not", lambda: None)
    held = drawn(2, 128, 64, 32, zeros=True, bias=True, device="cpu")
    typed = typed_experts(held)
    stack = typed.down
    loose = replace(stack, tensors={**stack.tensors, "scales": stack.tensors["scales"].transpose(1, 2)})

    def why(own: ExpertsWeight = typed, dtype: torch.dtype = HALF, device: torch.device = CUDA) -> str | None:
        return experts.why_no_experts(own, dtype, device)

    assert why() is None
    assert why(typed_experts(drawn_numbers(2, 128, 64, "e5m2", device="cpu"))) == (
        "gate_up: no kernel reads experts as fp8_strips of Fp8StripsConfig(blocks=False, codes='e5m2')"
    )
    assert why(device=torch.device("cpu")) == "needs a CUDA device, got cpu"
    assert why(dtype=torch.float32) == "x has to be float16 or bfloat16, got torch.float32"
    assert why(dtype=BF16) == (
        "gate_up: x is torch.bfloat16, scales and biases are torch.float16, torch.float16"
    )
    assert why(replace(typed, down=loose)) == "down: stacks that are not contiguous"
    assert why(replace(typed, local=LocalExperts(0, 2, 4096))) is None
    assert why(replace(typed, local=LocalExperts(0, 2, 4097))) == "at most 4096 experts, got 4097"
    apart = with_input_scales(
        typed_experts(drawn_numbers(2, 128, 64, "channel", device="cpu"), scheme=STATIC),
        torch.ones(2),
        torch.full((2,), 2.0),
    )
    assert experts.why_no_experts(apart, HALF, CUDA) is None
    assert experts.why_no_experts(apart, HALF, CUDA, declared=True) == (
        "gate_up: gate and up have stored scales of inputs that differ"
    )
    hand.hopper = False
    assert why() == "the CUDA module was built without QLOAD_CUDA_ARCHS=90a"
    monkeypatch.setattr(module, "why_not", lambda: "no module")
    assert why(dtype=torch.float32) == "no module"


@pytest.mark.parametrize("chip", [AMPERE])
def test_other_chips_multiply_experts_elsewhere(hand: HandOfExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_not", lambda: None)
    typed = typed_experts(drawn(2, 128, 64, device="cpu"))

    assert experts.why_no_experts(typed, HALF, CUDA) == "needs a device of capability 9.0, got 8.0"


def test_the_map_of_experts_is_copied_once() -> None:
    local = LocalExperts(1, 3, 4)

    places = experts._map(local, torch.device("cpu"))

    assert (places.dtype, places.tolist()) == (torch.int32, [-1, 0, 1, -1])
    assert experts._map(LocalExperts(1, 3, 4), torch.device("cpu")) is places


def test_a_gradient_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "why_no_experts", lambda weight, dtype, device, declared: None)
    x, weights = torch.ones(2, 4), torch.ones(2, 1)
    wanted = x.clone().requires_grad_()

    assert experts.can_multiply_experts(x, weights, None)
    assert experts.can_multiply_experts(x, weights.half(), None)
    assert not experts.can_multiply_experts(x, weights.double(), None)
    assert not experts.can_multiply_experts(wanted, weights, None)
    assert not experts.can_multiply_experts(x, weights.clone().requires_grad_(), None)
    with torch.no_grad():
        assert experts.can_multiply_experts(wanted, weights, None)
    monkeypatch.setattr(experts, "why_no_experts", lambda weight, dtype, device, declared: "no module")
    assert not experts.can_multiply_experts(x, weights, None)
