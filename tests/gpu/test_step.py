"""Sums and norms, heads and gates of a step: within the rounding of their formulas, nothing else read."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.experts import GatedActivation, Routing
from qload.kernels.bounds import Bounded, bound_gated_activation, exact, excess, roundings
from qload.kernels.cuda import decoder_ops
from qload.kernels.cuda.module import native, pointer, stream
from qload.testing import assert_same_bits, assert_same_twice
from tests.gpu.device_tensors import GUARD, guarded
from tests.gpu.layers import DTYPES

pytestmark = pytest.mark.gpu
SILU = GatedActivation("silu")
CLAMPED = GatedActivation("clamped_swiglu", 1.702, 7.0)
ACTIVATIONS = [SILU, GatedActivation("gelu"), GatedActivation("gelu_tanh"), CLAMPED]
NORMED = [8, 64, 264, 4096, 8192, 8200, 16384, 16392, 32768]  # on both sides of what a thread takes
# In float32: 32 numbers of a thread, two rounds of five among threads; a mean, a root (4 u), two products.
SUMMED, SCALED = 4 * 8 + 10, 1 + 1 + 4 + 2


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    make = torch.Generator(device="cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, device="cuda", generator=make).to(dtype)


def in_nan(tensor: Tensor) -> Tensor:
    """The same between numbers that nobody may read, at a multiple of 16 bytes."""
    memory = torch.full((tensor.numel() + 2 * GUARD,), float("nan"), device="cuda", dtype=tensor.dtype)
    return memory[GUARD:-GUARD].view(tensor.shape).copy_(tensor)


def normed(x: Tensor, weight: Tensor, eps: float) -> Bounded:
    """The norm of rows x (..., H), and what float32 may be off by."""
    value = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    return Bounded(value, value.abs() * roundings(SUMMED + SCALED))


def assert_close(got: Tensor, want: Bounded) -> None:
    assert float(excess(got, want).max()) <= 1


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("size", NORMED)
def test_a_sum_has_torchs_bits_and_its_norm_is_within_rounding(
    size: int, rows: int, dtype: torch.dtype
) -> None:
    x, added = (in_nan(drawn(rows, size, dtype=dtype, seed=seed)) for seed in (1, 2))
    weight = in_nan(1 + drawn(size, dtype=dtype) / 4)

    made = decoder_ops.add_norm(x, added, weight, 1e-5)
    alone = decoder_ops.norm(x + added, weight, 1e-5)

    assert made is not None
    assert alone is not None
    assert_same_bits(made[0], x + added)
    assert_close(made[1], normed(x + added, weight, 1e-5))
    assert_same_bits(alone, made[1])


@DTYPES
def test_a_row_of_zeros_is_zeros_and_one_with_nan_harms_no_other(dtype: torch.dtype) -> None:
    x = drawn(3, 512, dtype=dtype)
    x[0], x[1, 77] = 0, float("nan")
    y = decoder_ops.norm(x, torch.ones(512, device="cuda", dtype=dtype), 1e-6)

    assert y is not None
    assert not y[0].any()
    assert y[1].isnan().all()
    assert_close(y[2:], normed(x[2:], torch.ones(512, device="cuda"), 1e-6))


def test_a_small_eps_counts_in_the_mean_of_squares() -> None:
    x = torch.full((1, 16), 2.0**-12, device="cuda").half()
    y = decoder_ops.norm(x, torch.ones(16, device="cuda").half(), 3 * 2.0**-24)

    assert y is not None
    assert_same_bits(y, torch.full_like(x, 0.5))


@pytest.mark.parametrize("shape", [(2, 12), (2, 32776), (0, 8)])
def test_rows_that_no_kernel_takes_are_left_to_torch(shape: tuple[int, int]) -> None:
    x, weight = torch.ones(shape, device="cuda").half(), torch.ones(shape[1], device="cuda").half()

    y = decoder_ops.norm(x, weight, 1e-5)

    assert (y is None) == (shape[0] > 0)
    assert decoder_ops.norm(x.float(), weight.float(), 1e-5) is None
    assert decoder_ops.norm(x.cpu(), weight.cpu(), 1e-5) is None
    with torch.enable_grad():
        assert decoder_ops.norm(x.clone().requires_grad_(), weight, 1e-5) is None


def turned(x: Bounded, cos: Tensor, sin: Tensor, pairs: bool) -> Bounded:
    """Heads (T, heads, D) turned by float32 cos and sin (T, D / 2)."""
    half = x.value.shape[-1] // 2
    at = (slice(0, None, 2), slice(1, None, 2)) if pairs else (slice(0, half), slice(half, None))
    a, b = (x[each] for each in at)
    c, s = (exact(each[:, None]) for each in (cos, sin))
    minus_b = Bounded(-b.value, b.error)
    found = a * c + minus_b * s, b * c + a * s
    value, error = torch.empty_like(x.value), torch.empty_like(x.value)
    for place, each in zip(at, found, strict=True):
        value[..., place], error[..., place] = each.value, each.error
    return Bounded(value, error)


HEADS = [(16, 1, 1), (64, 4, 1), (80, 2, 2), (96, 6, 3), (128, 32, 8), (192, 5, 5), (256, 3, 1), (512, 2, 1)]


@DTYPES
@pytest.mark.parametrize("normalized", [False, True], ids=["as they are", "normed"])
@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(("D", "queries", "kv"), HEADS)
def test_heads_are_turned_within_rounding_and_go_to_their_slots_alone(
    D: int, queries: int, kv: int, pairs: bool, normalized: bool, dtype: torch.dtype
) -> None:
    T, eps, slots = 3, 1e-6, torch.tensor([11, 0, 5], device="cuda")
    heads = in_nan(drawn(T, queries + 2 * kv, D, dtype=dtype))
    angles = torch.rand(T, D // 2, device="cuda") * 100
    cos, sin = in_nan(angles.cos()), in_nan(angles.sin())
    (keys, all_keys), (values, all_values) = (guarded((3, 4, kv, D), dtype) for _ in range(2))
    norms = tuple(in_nan(1 + drawn(D, dtype=dtype, seed=seed) / 4) for seed in (1, 2)) if normalized else None

    q = decoder_ops.place_heads(heads, cos, sin, slots, (keys, values), pairs=pairs, norms=norms, eps=eps)  # type: ignore[arg-type]

    own_q, own_k, own_v = torch.split(heads, [queries, kv, kv], 1)
    own = [exact(own_q), exact(own_k)]
    if norms is not None:
        own = [normed(each, w, eps).rounded_to(dtype) for each, w in zip((own_q, own_k), norms, strict=True)]
    assert q is not None
    assert_close(q, turned(own[0], cos, sin, pairs))
    assert_close(keys.flatten(0, 1)[slots], turned(own[1], cos, sin, pairs))
    assert_same_bits(values.flatten(0, 1)[slots], own_v.contiguous())
    for held, memory in ((keys, all_keys), (values, all_values)):
        held.flatten(0, 1)[slots] = 77
        assert (memory == 77).all()


def test_heads_of_another_size_than_the_caches_are_left_to_torch() -> None:
    heads, cos = torch.ones(1, 3, 32, device="cuda").half(), torch.ones(1, 16, device="cuda")
    slots, wide = (
        torch.zeros(1, device="cuda", dtype=torch.int64),
        torch.ones(1, 4, 1, 48, device="cuda").half(),
    )

    assert decoder_ops.place_heads(heads, cos, cos, slots, (wide, wide), pairs=False) is None
    assert (
        decoder_ops.place_heads(heads, cos, cos, slots, (wide[..., :32].clone(), wide), pairs=False) is None
    )
    assert (wide == 1).all()


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda each: each.kind)
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (3, 1016), (2, 1024), (2, 1032), (70, 14336)])
def test_gate_and_up_are_one_within_rounding(
    rows: int, columns: int, activation: GatedActivation, dtype: torch.dtype
) -> None:
    both = in_nan(drawn(rows, 2 * columns, dtype=dtype) * 4)
    y = decoder_ops.gated(both, activation)
    gate, up = (exact(each) for each in both.chunk(2, -1))

    assert y is not None
    assert_close(y, bound_gated_activation(gate, up, activation.kind, activation.alpha, activation.limit))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda each: each.kind)
def test_a_nan_of_gate_or_up_stays_where_it_is(activation: GatedActivation) -> None:
    both = torch.ones(2, 48, device="cuda").half()
    both[0, 3] = both[1, 24 + 5] = float("nan")
    y = decoder_ops.gated(both, activation)

    assert y is not None
    assert y.isnan().nonzero().tolist() == [[0, 3], [1, 5]]
    assert decoder_ops.gated(both[:, :40].contiguous(), activation) is None


def whole_numbers(*shape: int, largest: int, dtype: torch.dtype) -> Tensor:
    """Return drawn integers; float32 represents the sums of their products exactly."""
    make = torch.Generator(device="cuda").manual_seed(sum(shape))
    return torch.randint(-largest, largest + 1, shape, device="cuda", generator=make).to(dtype)


ROUTED = [(1, 128, 2048, 8), (3, 32, 2880, 4), (9, 8, 4096, 2), (64, 1000, 264, 32), (17, 1, 8, 1)]
KINDS = [
    ("softmax_top_k", False, False),
    ("softmax_top_k", True, False),
    ("softmax_top_k", True, True),
    ("top_k_softmax", False, False),
]


@DTYPES
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("method", "renormalized", "rounded"), KINDS)
@pytest.mark.parametrize(("tokens", "experts", "size", "top"), ROUTED)
def test_scores_have_torchs_bits_and_equal_ones_the_order_of_experts(
    tokens: int, experts: int, size: int, top: int,
    method: Any, renormalized: bool, rounded: bool, biased: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    x = in_nan(whole_numbers(tokens, size, largest=3, dtype=dtype) / 8)
    weight = in_nan(whole_numbers(experts, size, largest=2, dtype=dtype) / 4)
    bias = in_nan(whole_numbers(experts, largest=4, dtype=dtype)) if biased else None
    routing = Routing(method, experts, top, renormalized=renormalized, rounded=rounded)

    chosen = decoder_ops.route(x, weight, bias, routing)

    sums = x.double() @ weight.double().T
    logits = (sums if bias is None else sums + bias.double()).to(dtype)
    scores = logits if method == "top_k_softmax" else logits.softmax(-1, dtype=torch.float32)
    weights, ids = (each[:, :top] for each in scores.sort(dim=-1, descending=True, stable=True))
    if method == "top_k_softmax":
        weights = weights.softmax(-1)
    assert chosen is not None
    assert_same_bits(chosen[0], ids.contiguous())
    if not renormalized:
        assert_same_bits(chosen[1], weights.float())
        return
    shares = weights.double() / weights.double().sum(-1, keepdim=True)
    want = Bounded(shares, shares * roundings(top + 1))
    assert_close(chosen[1], want.rounded_to(dtype) if rounded else want)


def test_a_token_with_nan_goes_to_experts_that_exist() -> None:
    x, weight = drawn(3, 64, dtype=torch.float16), drawn(16, 64, dtype=torch.float16)
    x[1, 5] = float("nan")
    chosen = decoder_ops.route(x, weight, None, Routing("softmax_top_k", 16, 4))

    assert chosen is not None
    assert chosen[0][1].tolist() == [0, 1, 2, 3]
    assert chosen[1].isnan().all(1).tolist() == [False, True, False]


def test_nothing_beside_a_result_is_written() -> None:
    x, weight = drawn(3, 264, dtype=torch.float16), drawn(264, dtype=torch.float16)
    (total, one), (y, other), (gated, third) = (
        guarded(shape, x.dtype) for shape in ((3, 264), (3, 264), (3, 136))
    )
    both = drawn(3, 272, dtype=torch.float16)

    native().add_norm(*map(pointer, (x, x, weight, total, y)), [3, 264], 1e-5, False, stream(x))
    native().gate_pairs(pointer(both), pointer(gated), [3, 136], (0, 0.0, 0.0), False, stream(x))

    (ids, fourth), (weights, fifth) = guarded((3, 4), torch.int64), guarded((3, 4), torch.float32)
    router = drawn(24, 264, dtype=torch.float16)
    native().route_tokens(
        *map(pointer, (x, router, None, ids, weights)), [3, 264, 24, 4], [False] * 3, False, stream(x)
    )

    for made, memory in ((total, one), (y, other), (gated, third), (ids, fourth), (weights, fifth)):
        assert not (made == 77).all()
        assert (memory[:GUARD] == 77).all()
        assert (memory[-GUARD:] == 77).all()


def test_the_same_bits_twice_and_at_an_odd_address() -> None:
    memory = drawn(1 + 5 * 512, dtype=torch.float16)
    odd, weight = memory[1:].view(5, 512), drawn(512, dtype=torch.float16)

    def normalize(x: Tensor) -> Tensor:
        y = decoder_ops.norm(x, weight, 1e-5)
        assert y is not None
        return y

    def gate(x: Tensor) -> Tensor:
        y = decoder_ops.gated(x, SILU)
        assert y is not None
        return y

    for run in (normalize, gate):
        assert_same_twice(run, odd)
        assert_same_bits(run(odd), run(odd.clone()))


def test_operators_are_as_they_say() -> None:
    ops: Any = torch.ops.qload
    x, weight = drawn(2, 64, dtype=torch.float16), drawn(64, dtype=torch.float16)
    heads, cos = drawn(2, 6, 32, dtype=torch.float16), torch.rand(2, 16, device="cuda")
    slots, (keys, values) = (
        torch.tensor([1, 2], device="cuda"),
        torch.zeros(2, 2, 4, 1, 32, device="cuda").half(),
    )

    torch.library.opcheck(ops.rms_norm.default, (x, weight, 1e-5))
    torch.library.opcheck(ops.add_rms_norm.default, (x, x.clone(), weight, 1e-5))
    torch.library.opcheck(ops.gate_pairs.default, (x, "silu", 0.0, 0.0))
    router = drawn(8, 64, dtype=torch.float16)
    torch.library.opcheck(ops.route_tokens.default, (x, router, None, 2, False, True, True))
    torch.library.opcheck(
        ops.place_heads.default, (heads, cos, cos.clone(), slots, keys, values, None, None, 0.0, False)
    )
