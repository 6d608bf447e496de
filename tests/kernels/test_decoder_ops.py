"""Operators between the products of a decoder layer: accepted tensors, and arguments of launches."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qload import native
from qload.errors import ArgumentError
from qload.experts import GatedActivation, Routing
from qload.kernels.bounds import STEPS, Bounded, excess, roundings
from qload.kernels.cuda import decoder_ops
from qload.native.modules import NativeModule
from tests.kernels.cuda_layers import AMPERE, installed, on_cpu
from tests.kernels.cuda_steps import HandOfSteps, attended, normed, turned

pytestmark = pytest.mark.usefixtures("seen_texts")

OPERATORS = {
    "rms_norm": decoder_ops._rms_norm,
    "add_rms_norm": decoder_ops._add_rms_norm,
    "place_heads": decoder_ops._place_heads,
    "gate_pairs": decoder_ops._gate_pairs,
    "attend_pages": decoder_ops._attend_pages,
    "route_tokens": decoder_ops._route_tokens,
}
HALF, BF16, LONG = torch.float16, torch.bfloat16, torch.int64
DTYPES = pytest.mark.parametrize("dtype", [HALF, BF16], ids=["float16", "bfloat16"])
SILU, CLAMPED = GatedActivation("silu"), GatedActivation("clamped_swiglu", 1.702, 7.0)
GELUS = GatedActivation("gelu"), GatedActivation("gelu_tanh")


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    with on_cpu(OPERATORS):
        yield


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> HandOfSteps:
    made = installed(HandOfSteps(AMPERE), monkeypatch)
    monkeypatch.setattr(decoder_ops, "load", lambda name: NativeModule(made))
    return made


@pytest.fixture
def on_host(steps: HandOfSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_ops, "takes", lambda *tensors: True)


def drawn(*shape: int, dtype: torch.dtype = HALF, at: int = 0) -> Tensor:
    """Random numbers, from a place of their memory on."""
    count = torch.Size(shape).numel()
    memory = torch.randn(at + count, generator=torch.Generator().manual_seed(sum(shape) + at)).to(dtype)
    return memory[at:].view(shape)


@DTYPES
@pytest.mark.parametrize("at", [0, 1], ids=["aligned", "between two loads"])
@pytest.mark.usefixtures("on_host")
def test_a_norm_and_one_of_a_sum(dtype: torch.dtype, at: int) -> None:
    x, added, weight = drawn(3, 2, 24, dtype=dtype, at=at), drawn(3, 2, 24, dtype=dtype, at=2 * at), drawn(24)
    weight = weight.to(dtype)

    alone, both = decoder_ops.norm(x, weight, 0.5), decoder_ops.add_norm(x, added, weight, 0.25)

    assert alone is not None
    assert both is not None
    assert torch.equal(alone, normed(x, weight, 0.5).to(dtype))
    assert torch.equal(both[0], x + added)
    assert torch.equal(both[1], normed(x + added, weight, 0.25).to(dtype))
    columns = x.transpose(0, 1)
    assert torch.equal(decoder_ops.norm(columns, weight, 0.5), alone.transpose(0, 1))  # type: ignore[arg-type]


@DTYPES
@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("with_norms", [False, True], ids=["as they are", "normed"])
@pytest.mark.parametrize("at", [0, 1], ids=["aligned", "between two loads"])
@pytest.mark.usefixtures("on_host")
def test_heads_are_turned_and_go_to_their_slots(
    dtype: torch.dtype, pairs: bool, with_norms: bool, at: int
) -> None:
    T, queries, kv, D, slots = 3, 4, 2, 16, torch.tensor([11, 0, 5])
    heads, angles = drawn(T, queries + 2 * kv, D, dtype=dtype, at=at), drawn(T, D // 2, dtype=torch.float32)
    cos, sin = angles.cos(), torch.cat([torch.zeros(at), angles.sin().flatten()])[at:].view(T, D // 2)
    keys, values = (torch.full((3, 4, kv, D), 77, dtype=dtype) for _ in range(2))
    norms = (drawn(D, dtype=dtype, at=at), drawn(D, dtype=dtype, at=3 * at)) if with_norms else None

    q = decoder_ops.place_heads(heads, cos, sin, slots, (keys, values), pairs=pairs, norms=norms, eps=0.5)

    own = list(heads.split([queries, kv, kv], 1))
    if norms is not None:
        own[:2] = [normed(each, w, 0.5).to(dtype) for each, w in zip(own, norms, strict=False)]
    assert q is not None
    assert torch.equal(q, turned(own[0], cos, sin, pairs).to(dtype))
    assert torch.equal(keys.flatten(0, 1)[slots], turned(own[1], cos, sin, pairs).to(dtype))
    assert torch.equal(values.flatten(0, 1)[slots], own[2])
    for held in (keys, values):
        assert int((held == 77).all(-1).sum()) == (12 - T) * kv


@DTYPES
@pytest.mark.parametrize("activation", [SILU, *GELUS, CLAMPED], ids=lambda each: each.kind)
@pytest.mark.usefixtures("on_host")
def test_gate_and_up_become_one(dtype: torch.dtype, activation: GatedActivation) -> None:
    both = 4 * drawn(3, 2, 48, dtype=dtype, at=1)

    y = decoder_ops.gated(both.transpose(0, 1), activation)

    assert y is not None
    want = activation(*both.double().chunk(2, -1)).to(dtype)
    assert torch.equal(y, want.transpose(0, 1))


@DTYPES
@pytest.mark.parametrize("limits", [{}, {"window": 3}, {"chunk": 4}, {"window": 3, "chunk": 4}], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("more", [0, 8], ids=["whole heads", "wider in the cache"])
@pytest.mark.usefixtures("on_host")
def test_a_token_sees_keys_of_its_pages(dtype: torch.dtype, limits: Any, sinks: bool, more: int) -> None:
    positions, k_size, v_size = [9, 0, 6], 16, 8
    pages = torch.tensor([[3, 1, 5, 0], [2, 0, 0, 0], [4, 6, 0, 0]]).repeat_interleave(2, 1)[:, ::2]
    keys, values = drawn(7, 4, 2, k_size + more, dtype=dtype), drawn(7, 4, 2, v_size + more, dtype=dtype)
    q = drawn(8, 3, k_size, dtype=dtype, at=1).transpose(0, 1)
    columns = torch.arange(8).to(dtype) / 4 if sinks else None

    y = decoder_ops.attend_pages(
        q, (keys, values), torch.tensor(positions), pages, v_size=v_size, scale=0.5, sinks=columns, **limits
    )

    assert y is not None
    for s, at in enumerate(positions):
        first = max(at - limits.get("window", 99) + 1, at - at % limits.get("chunk", 99), 0)
        seen = [(int(pages[s, n // 4]), n % 4) for n in range(first, at + 1)]
        k = torch.stack([keys[place][..., :k_size] for place in seen])
        v = torch.stack([values[place][..., :v_size] for place in seen])
        assert torch.equal(y[s], attended(q[s], k, v, columns, 0.5).to(dtype))


ROUTINGS = [
    Routing("softmax_top_k", 12, 4),
    Routing("softmax_top_k", 12, 3, renormalized=True),
    Routing("softmax_top_k", 12, 4, renormalized=True, rounded=True),
    Routing("top_k_softmax", 12, 4),
]


@DTYPES
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.usefixtures("on_host")
def test_tokens_are_routed_as_by_their_logits(dtype: torch.dtype, routing: Routing, biased: bool) -> None:
    x, weight = drawn(24, 5, dtype=dtype, at=1).T, drawn(12, 24, dtype=dtype, at=1)
    bias = torch.arange(12).to(dtype) / 8 if biased else None

    chosen = decoder_ops.route(x, weight, bias, routing)

    wide = [None if each is None else each.double() for each in (x, weight, bias)]
    ids, weights = routing.route(routing.logits(*wide).to(dtype))  # type: ignore[arg-type]
    summed = weights.double() * roundings(2 * routing.experts + STEPS)
    assert chosen is not None
    assert torch.equal(chosen[0], ids)
    assert excess(chosen[1], Bounded(weights.double(), summed).rounded_to(weights.dtype)).max() <= 1


def heads_of(
    D: int = 16, K: int | None = None, V: int | None = None, *, device: str = "cuda", dtype: Any = HALF
) -> Tensor | None:
    """Three heads of a token, one each of queries, keys and values."""
    heads, cos = (torch.empty(1, 3, D, dtype=dtype, device=device), torch.empty(1, D // 2, device=device))
    keys, values = (torch.empty(1, 4, 1, size or D, dtype=dtype, device=device) for size in (K, V))
    slots = torch.zeros(1, dtype=LONG, device=device)
    return decoder_ops.place_heads(heads, cos, cos, slots, (keys, values), pairs=False)


def norm_of(H: int = 16, *, weight: Any = HALF, on: str = "cuda", dtype: Any = HALF) -> Tensor | None:
    x = torch.empty(2, 3, H, dtype=dtype, device="cuda")
    return decoder_ops.norm(x, torch.empty(H, dtype=weight, device=on), 1e-5)


def sum_of(H: int = 16, added: tuple[int, ...] = (2, 3, 16), dtype: Any = HALF) -> Any:
    x, weight = torch.empty(2, 3, H, dtype=HALF, device="cuda"), torch.empty(H, dtype=HALF, device="cuda")
    made = decoder_ops.add_norm(x, torch.empty(added, dtype=dtype, device="cuda"), weight, 1e-5)
    return None if made is None else torch.stack(made)


def gate_of(columns: int = 16, dtype: Any = HALF) -> Tensor | None:
    return decoder_ops.gated(torch.empty(2, 3, columns, dtype=dtype, device="cuda"), SILU)


def attention_of(
    sizes: tuple[int, ...] = (8, 8, 8, 8), S: int = 1, heads: int = 2, page: tuple[int, int] = (4, 3),
    dtype: Any = HALF,
) -> Tensor | None:  # fmt: skip
    k_size, v_size, *wide = sizes
    q = torch.empty(S, heads, k_size, dtype=dtype, device="cuda")
    cache = [torch.empty(1, page[0], 2, size, dtype=HALF, device="cuda") for size in wide]
    table = torch.empty(S, page[1], dtype=LONG, device="cuda")
    at = torch.empty(S, dtype=LONG, device="cuda")
    return decoder_ops.attend_pages(q, tuple(cache), at, table, v_size=v_size, scale=1.0)  # type: ignore[arg-type]


def routing_of(
    H: int = 16, T: int = 1, k: int = 2, E: int = 32, method: Any = "softmax_top_k", bias: Any = None,
    dtype: Any = HALF,
) -> Tensor | None:  # fmt: skip
    x, weight = (torch.empty(rows, H, dtype=dtype, device="cuda") for rows in (T, E))
    own = None if bias is None else torch.empty(E, dtype=bias, device="cuda")
    chosen = decoder_ops.route(x, weight, own, Routing(method, E, k))
    return None if chosen is None else torch.stack([chosen[0].float(), chosen[1]])


TAKEN = [
    (lambda: norm_of(8), (2, 3, 8)),
    (lambda: norm_of(dtype=BF16, weight=BF16), (2, 3, 16)),
    (lambda: norm_of(32768), (2, 3, 32768)),
    (lambda: norm_of(32776), None),
    (lambda: norm_of(12), None),
    (lambda: norm_of(0), None),
    (lambda: norm_of(weight=BF16), None),
    (lambda: norm_of(dtype=torch.float32, weight=torch.float32), None),
    (lambda: norm_of(on="cuda:1"), None),
    (sum_of, (2, 2, 3, 16)),
    (lambda: sum_of(12, (2, 3, 12)), None),
    (lambda: sum_of(added=(3, 16)), None),
    (lambda: sum_of(dtype=BF16), None),
    (heads_of, (1, 1, 16)),
    (lambda: heads_of(512), (1, 1, 512)),
    (lambda: heads_of(528), None),
    (lambda: heads_of(24), None),
    (lambda: heads_of(0), None),
    (lambda: heads_of(16, 32), None),
    (lambda: heads_of(16, None, 32), None),
    (lambda: heads_of(dtype=torch.float32), None),
    (lambda: heads_of(device="cpu"), None),
    (gate_of, (2, 3, 8)),
    (lambda: gate_of(24), None),
    (lambda: gate_of(dtype=torch.float32), None),
    (attention_of, (1, 2, 8)),
    (lambda: attention_of((256, 8, 256, 8)), (1, 2, 8)),
    (lambda: attention_of((8, 256, 8, 264)), (1, 2, 256)),
    (lambda: attention_of((264, 8, 264, 8)), None),
    (lambda: attention_of((8, 264, 8, 264)), None),
    (lambda: attention_of((12, 8, 16, 8)), None),
    (lambda: attention_of((8, 12, 8, 16)), None),
    (lambda: attention_of((8, 8, 12, 8)), None),
    (lambda: attention_of((8, 8, 8, 12)), None),
    (lambda: attention_of((0, 8, 8, 8)), None),
    (lambda: attention_of(S=65535), (65535, 2, 8)),
    (lambda: attention_of(S=65536), None),
    (lambda: attention_of(heads=65535), (1, 65535, 8)),
    (lambda: attention_of(heads=65536), None),
    (lambda: attention_of(page=(1 << 15, (1 << 15) - 1)), (1, 2, 8)),
    (lambda: attention_of(page=(1 << 15, 1 << 15)), None),
    (lambda: attention_of(dtype=BF16), None),
    (routing_of, (2, 1, 2)),
    (lambda: routing_of(bias=HALF, method="top_k_softmax"), (2, 1, 2)),
    (lambda: routing_of(T=64, k=32, E=1024), (2, 64, 32)),
    (lambda: routing_of(T=65), None),
    (lambda: routing_of(k=33, E=64), None),
    (lambda: routing_of(E=1032), None),
    (lambda: routing_of(H=12), None),
    (lambda: routing_of(H=0), None),
    (lambda: routing_of(bias=BF16), None),
    (lambda: routing_of(method="top_k_sigmoid"), None),
    (lambda: routing_of(dtype=torch.float32), None),
]


@pytest.mark.parametrize(("call", "shape"), TAKEN)
@pytest.mark.usefixtures("steps")
def test_the_sizes_that_kernels_take(call: Any, shape: tuple[int, ...] | None) -> None:
    with FakeTensorMode():
        y = call()

    assert shape == (None if y is None else tuple(y.shape))


def test_tensors_are_taken_without_gradients_where_a_module_runs(
    steps: HandOfSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode():
        x, weight = (torch.empty(2, 16, dtype=HALF, device="cuda") for _ in range(2))
        assert decoder_ops.takes(x, weight)
        weight.requires_grad_()
        assert not decoder_ops.takes(x, weight)
        with torch.no_grad():
            assert decoder_ops.takes(x, weight)
            with native.reference():
                assert not decoder_ops.takes(x, weight)
            monkeypatch.setattr(steps, "ptx", "")
            assert decoder_ops.takes(x)
            monkeypatch.setattr(steps, "chips", "90a")
            assert not decoder_ops.takes(x)
            monkeypatch.setattr(decoder_ops, "load", lambda name: NativeModule(None, "not built"))
            assert not decoder_ops.takes(x)


def odd(*shape: int) -> Tensor:
    return drawn(*shape, at=1)


HEADS = {
    "heads": drawn(2, 6, 16), "cos": torch.ones(2, 8), "sin": torch.ones(2, 8), "slots": torch.arange(2),
    "keys": torch.ones(3, 4, 2, 16).half(), "values": torch.ones(3, 4, 2, 16).half(),
    "q_norm": None, "k_norm": None, "eps": 0.5, "pairs": False,
}  # fmt: skip
ATTENTION = {
    "q": drawn(2, 4, 16), "keys": torch.ones(3, 4, 2, 16).half(), "values": torch.ones(3, 4, 2, 8).half(),
    "positions": torch.arange(2), "pages": torch.zeros(2, 3, dtype=LONG), "sinks": None, "v_size": 8,
    "scale": 1.0, "window": 0, "chunk": 0,
}  # fmt: skip
NORM = {"x": drawn(2, 16), "added": drawn(2, 16), "weight": drawn(16), "eps": 0.5}
ROUTE = {
    "x": drawn(2, 16), "weight": drawn(8, 16), "bias": None, "top_k": 2, "over_chosen": False,
    "renormalized": False, "rounded": False,
}  # fmt: skip
WHOLE = "(E, H) of at most 1024 experts, at least top_k of at most 32, and H a multiple of 8"
GATE = {"both": drawn(2, 32), "activation": "silu", "alpha": 0.0, "limit": 0.0}
REFUSED = [
    (
        "add_rms_norm",
        NORM,
        {"x": drawn(2, 16).float()},
        "x",
        "torch.float16 or torch.bfloat16",
        "torch.float32",
    ),
    ("add_rms_norm", NORM, {"weight": drawn(8)}, "weight", "shape (16,)", "(8,)"),
    ("add_rms_norm", NORM, {"weight": drawn(16).bfloat16()}, "weight", "torch.float16", "torch.bfloat16"),
    ("add_rms_norm", NORM, {"added": drawn(1, 16)}, "added", "shape (2, 16)", "(1, 16)"),
    ("add_rms_norm", NORM, {"added": drawn(2, 16).float()}, "added", "torch.float16", "torch.float32"),
    ("add_rms_norm", NORM, {"x": drawn(16, 2).T}, "x", "contiguous, on cpu", "strides (1, 2), on cpu"),
    (
        "rms_norm",
        {"x": drawn(2, 12), "weight": drawn(12), "eps": 0.5},
        {},
        "x",
        "rows of a multiple of 8, at most 32768",
        "(2, 12)",
    ),
    (
        "place_heads",
        HEADS,
        {"heads": drawn(2, 6, 16).float()},
        "heads",
        "torch.float16 or torch.bfloat16",
        "torch.float32",
    ),
    ("place_heads", HEADS, {"slots": torch.arange(3)}, "slots", "shape (2,)", "(3,)"),
    ("place_heads", HEADS, {"slots": torch.arange(2).int()}, "slots", "torch.int64", "torch.int32"),
    ("place_heads", HEADS, {"cos": torch.ones(2, 16)}, "cos", "shape (2, 8)", "(2, 16)"),
    ("place_heads", HEADS, {"sin": torch.ones(2, 8).half()}, "sin", "torch.float32", "torch.float16"),
    ("place_heads", HEADS, {"q_norm": drawn(8)}, "q_norm", "shape (16,)", "(8,)"),
    ("place_heads", HEADS, {"k_norm": drawn(16).float()}, "k_norm", "torch.float16", "torch.float32"),
    (
        "place_heads",
        HEADS,
        {"keys": odd(3, 4, 2, 16)},
        "keys",
        "memory from a multiple of 16 bytes on",
        "another place",
    ),
    (
        "place_heads",
        HEADS,
        {"values": torch.ones(3, 4, 1, 16).half()},
        "values",
        "shape (3, 4, 2, 16)",
        "(3, 4, 1, 16)",
    ),
    ("gate_pairs", GATE, {"both": drawn(2, 33)}, "both", "shape (2, 32)", "(2, 33)"),
    (
        "gate_pairs",
        GATE,
        {"both": drawn(2, 32).float()},
        "both",
        "torch.float16 or torch.bfloat16",
        "torch.float32",
    ),
    (
        "attend_pages",
        ATTENTION,
        {"q": drawn(2, 4, 16).float()},
        "q",
        "torch.float16 or torch.bfloat16",
        "torch.float32",
    ),
    ("attend_pages", ATTENTION, {"positions": torch.arange(3)}, "positions", "shape (2,)", "(3,)"),
    (
        "attend_pages",
        ATTENTION,
        {"positions": torch.arange(2).int()},
        "positions",
        "torch.int64",
        "torch.int32",
    ),
    ("attend_pages", ATTENTION, {"pages": torch.zeros(3, 3, dtype=LONG)}, "pages", "shape (2, 3)", "(3, 3)"),
    ("attend_pages", ATTENTION, {"sinks": torch.ones(5)}, "sinks", "shape (4,)", "(5,)"),
    ("attend_pages", ATTENTION, {"sinks": torch.ones(4).half()}, "sinks", "torch.float32", "torch.float16"),
    (
        "attend_pages",
        ATTENTION,
        {"values": torch.ones(2, 4, 2, 8).half()},
        "values",
        "shape (3, 4, 2, 8)",
        "(2, 4, 2, 8)",
    ),
    (
        "attend_pages",
        ATTENTION,
        {"q": drawn(2, 3, 16)},
        "q",
        "a multiple of 2 heads, at most 16 and 8 numbers",
        "3 heads of 16 and 8",
    ),
    (
        "attend_pages",
        ATTENTION,
        {"q": drawn(2, 4, 24)},
        "q",
        "a multiple of 2 heads, at most 16 and 8 numbers",
        "4 heads of 24 and 8",
    ),
    (
        "attend_pages",
        ATTENTION,
        {"v_size": 16},
        "q",
        "a multiple of 2 heads, at most 16 and 8 numbers",
        "4 heads of 16 and 16",
    ),
    ("route_tokens", ROUTE, {"weight": drawn(8, 16).bfloat16()}, "weight", "torch.float16", "torch.bfloat16"),
    ("route_tokens", ROUTE, {"weight": drawn(8, 8)}, "weight", "shape (8, 16)", "(8, 8)"),
    ("route_tokens", ROUTE, {"bias": drawn(16)}, "bias", "shape (8,)", "(16,)"),
    ("route_tokens", ROUTE, {"top_k": 9}, "weight", WHOLE, "(8, 16), top_k 9"),
    ("route_tokens", ROUTE, {"top_k": 0}, "weight", WHOLE, "(8, 16), top_k 0"),
    ("route_tokens", ROUTE, {"x": drawn(2, 12), "weight": drawn(8, 12)}, "weight", WHOLE, "(8, 12), top_k 2"),
]


@pytest.mark.parametrize(("name", "call", "changed", "argument", "expected", "got"), REFUSED)
@pytest.mark.usefixtures("steps")
def test_tensors_that_do_not_fit_are_refused(
    name: str, call: Any, changed: Any, argument: str, expected: str, got: str
) -> None:
    with pytest.raises(ArgumentError) as error:
        getattr(torch.ops.qload, name)(*{**call, **changed}.values())

    assert (error.value.argument, error.value.expected, error.value.got) == (argument, expected, got)
