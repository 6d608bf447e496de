"""The module over experts, by its public face alone: what it computes, and what its bits do not depend on."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import QloadError
from qload.experts import ExpertFacts, ExpertsWeight, LocalExperts
from qload.experts.activation import GatedActivation
from qload.experts.weight import stacked
from qload.testing import assert_same_bits
from tests.experts.bounds import Matrices, assert_within
from tests.experts.drawn import FORMATS, choices, down, gate_up, what_is_exact

pytestmark = pytest.mark.usefixtures("seen_texts")

ACTIVATIONS = {
    "silu": GatedActivation("silu"),
    "gelu": GatedActivation("gelu"),
    "gelu_tanh": GatedActivation("gelu_tanh"),
    "clamped_swiglu": GatedActivation("clamped_swiglu", 1.702, 7.0),
}
WIDTHS = {"plain": (37, 13), "gptq": (96, 64), "panels": (96, 64), "fp8": (48, 24), "mxfp4": (64, 96)}  # H, I
E, K = 6, 3

every_format = pytest.mark.parametrize("format", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(
    format: str, *, kind: str = "silu", side: str = "output", biased: bool = False, local: Any = None
) -> ExpertsWeight:
    """E experts of a format, or those that are local, always of the same numbers."""
    (H, inner), chance = WIDTHS[format], generator(3)
    pairs = gate_up(FORMATS[format], E, H, inner, chance), down(FORMATS[format], E, H, inner, chance)
    here = LocalExperts(0, E, E) if local is None else local
    biases = [torch.randn(E, size, generator=chance)[here.start : here.stop] for size in (2 * inner, H)]
    count = here.stop - here.start
    first, second = (
        stacked(f"mlp.experts.{name}", count, each[here.start : here.stop])
        for name, each in zip(("gate_up_proj", "down_proj"), pairs, strict=True)
    )
    facts = ExpertFacts(ACTIVATIONS[kind], "input" if side == "input" else "output")
    return ExpertsWeight(first, second, facts, here, *(biases if biased else (None, None)))


def matrices(weight: ExpertsWeight) -> dict[int, Matrices]:
    """What the experts mean, by their numbers in the whole layer."""
    found = {}
    for place in range(weight.shape[0]):
        gate, up = weight.gate_up.expert(place).dequantize().chunk(2)
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if weight.gate_up_bias is not None and weight.down_bias is not None:
            biases = (*weight.gate_up_bias[place].chunk(2), weight.down_bias[place])
        found[weight.local.start + place] = Matrices(
            gate, up, weight.down.expert(place).dequantize(), *biases
        )
    return found


def drawn(weight: ExpertsWeight, tokens: int = 7, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Inputs (T, H), ids and weights (T, K)."""
    x = torch.randn(tokens, weight.shape[1], generator=generator(tokens)).to(dtype)
    return x, *choices(tokens, E, K, generator(1))


def assert_means(weight: ExpertsWeight, y: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
    __tracebackhide__ = True
    act, side = weight.facts.activation, weight.facts.side
    means = what_is_exact(x, ids, weights, matrices(weight), side, act.kind, act.alpha, act.limit)
    assert y.dtype == x.dtype
    assert_within(y, means)


@every_format
@every_dtype
@pytest.mark.parametrize("side", ["output", "input"])
def test_experts_are_within_what_rounding_can_cost(format: str, dtype: torch.dtype, side: str) -> None:
    weight = made(format, side=side)
    x, ids, weights = drawn(weight, dtype=dtype)

    assert_means(weight, weight.get_linear()(x, ids, weights), x, ids, weights)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("side", ["output", "input"])
def test_every_activation_with_biases(kind: str, side: str) -> None:
    weight = made("plain", kind=kind, side=side, biased=True)
    x, ids, weights = drawn(weight)
    x = x * 8  # so that gate and up pass 7 on both sides

    assert_means(weight, weight.get_linear()(x, ids, weights), x, ids, weights)


def test_float64_is_computed_in_float64() -> None:
    weight = made("plain")
    x, ids, weights = drawn(weight, dtype=torch.float64)
    act = weight.facts.activation

    y = weight.get_linear()(x, ids, weights)

    means = what_is_exact(x, ids, weights, matrices(weight), "output", act.kind)
    assert y.dtype == torch.float64
    assert bool(((y - means.value).abs() <= means.error * 2.0**-28).all())  # u is 2**29 times smaller


@every_format
@every_dtype
def test_a_token_means_the_same_in_every_batch(format: str, dtype: torch.dtype) -> None:
    """Alone, in another order, and beside fewer others; the same batch gives the same bits."""
    weight = made(format, biased=True)
    x, ids, weights = drawn(weight, 11, dtype)
    module = weight.get_linear()

    assert_same_bits(module(x, ids, weights), module(x, ids, weights))

    for tokens in (*torch.arange(11).split(1), torch.arange(10, -1, -1), torch.arange(2, 7)):
        here = x[tokens], ids[tokens], weights[tokens]
        assert_means(weight, module(*here), *here)


def test_the_order_in_which_a_token_names_its_experts_changes_no_bit() -> None:
    weight = made("plain")
    x, ids, weights = drawn(weight)
    module = weight.get_linear()

    assert_same_bits(module(x, ids.flip(1), weights.flip(1)), module(x, ids, weights))


@every_format
@pytest.mark.parametrize("cuts", [(0, 3, 6), (0, 1, 5, 6)], ids=["even", "uneven"])
def test_a_rank_adds_what_its_experts_give_and_nothing_else(format: str, cuts: tuple[int, ...]) -> None:
    whole = made(format, biased=True)
    x, ids, weights = drawn(whole)
    for start, stop in pairwise(cuts):
        share = made(format, biased=True, local=LocalExperts(start, stop, E))

        y = share.get_linear()(x, ids, weights)

        elsewhere = ((ids < start) | (ids >= stop)).all(1)
        assert_same_bits(y[elsewhere], torch.zeros_like(y[elsewhere]))
        assert_means(share, y, x, ids, weights)


def test_of_tokens_that_chose_experts_elsewhere_nothing_is_multiplied() -> None:
    """Not by 0 either, which an infinite input would turn into NaN."""
    share = made("plain", local=LocalExperts(2, 4, E))
    x = torch.full((1, share.shape[1]), float("inf"))

    y = share.get_linear()(x, torch.tensor([[0, 4, 5]]), torch.ones(1, 3))

    assert_same_bits(y, torch.zeros_like(x))


def test_leading_dimensions_single_tokens_and_empty_batches_pass_through() -> None:
    weight = made("plain")
    module, (x, ids, weights) = weight.get_linear(), drawn(weight, 6)
    whole = module(x, ids, weights)

    assert_same_bits(module(x.view(2, 3, -1), ids, weights), whole.view(2, 3, -1))
    assert_means(weight, module(x[0], ids[:1], weights[:1])[None], x[:1], ids[:1], weights[:1])
    assert module(x[:0], ids[:0], weights[:0]).shape == (0, x.shape[1])
    assert_same_bits(module(x, ids[:, :0], weights[:, :0]), torch.zeros_like(x))


def test_ids_may_be_int32_inputs_need_not_be_contiguous_and_none_is_changed() -> None:
    weight = made("plain", side="input")
    module, (x, ids, weights) = weight.get_linear(), drawn(weight)
    kept = [each.clone() for each in (x, ids, weights)]
    whole = module(x, ids, weights)

    assert_same_bits(module(x.T.contiguous().T, ids.int(), weights), whole)
    for each, before in zip((x, ids, weights), kept, strict=True):
        assert_same_bits(each, before)


def test_routing_weights_of_a_narrow_dtype_are_taken_as_they_are() -> None:
    weight = made("plain")
    x, ids, weights = drawn(weight)
    narrow = weights.bfloat16()
    module = weight.get_linear()

    assert_same_bits(module(x, ids, narrow), module(x, ids, narrow.float()))


@every_format
def test_casting_a_module_casts_no_tensor(format: str) -> None:
    weight = made(format, biased=True)
    x, ids, weights = drawn(weight)
    module = weight.get_linear()
    before = module(x, ids, weights)

    module = module.half().double().bfloat16()

    for stack in ("gate_up", "down"):
        held = getattr(module.typed, stack).fields()
        for name, tensor in getattr(weight, stack).fields().items():
            assert_same_bits(held[name], tensor)
    assert_same_bits(module(x, ids, weights), before)


def test_moving_a_module_moves_every_tensor() -> None:
    weight = made("gptq", biased=True)
    module = weight.get_linear().to("meta")

    assert {tensor.device.type for tensor in module.state_dict().values() if tensor.dtype != torch.uint8} == {
        "meta"
    }
    assert module.typed.device.type == "meta"


def test_a_state_dict_of_other_experts_is_refused_though_its_shapes_fit() -> None:
    module, alike = made("plain").get_linear(), made("plain").get_linear()
    weight = made("plain", kind="gelu")

    module.load_state_dict(alike.state_dict())
    with pytest.raises(ValueError, match=r"state dict\n  expected .*silu.*\n  got .*gelu"):
        module.load_state_dict(weight.get_linear().state_dict())


def test_a_state_dict_brings_the_numbers_along() -> None:
    weight, (x, ids, weights) = made("fp8", biased=True), drawn(made("fp8"))
    zero = replace(
        weight,
        gate_up=weight.gate_up.holding({n: torch.zeros_like(t) for n, t in weight.gate_up.fields().items()}),
    )
    module = zero.get_linear()
    assert not torch.equal(module(x, ids, weights), weight.get_linear()(x, ids, weights))

    module.load_state_dict(weight.get_linear().state_dict())

    assert_same_bits(module(x, ids, weights), weight.get_linear()(x, ids, weights))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        pytest.param(
            [[0, 6, 1]], r"expected numbers of experts, 0 to 5\n  got      6 at \(0, 1\)", id="above"
        ),
        pytest.param([[-1, 2, 9]], r"got      -1 at \(0, 0\) \(2 in all\)", id="below"),
    ],
)
@pytest.mark.parametrize("local", [None, LocalExperts(2, 4, E)], ids=["whole", "share"])
def test_a_number_of_no_expert_is_refused_by_every_rank(wrong: Any, said: str, local: Any) -> None:
    weight = made("plain", local=local)
    x = torch.ones(1, weight.shape[1])

    with pytest.raises(ValueError, match=said):
        weight.get_linear()(x, torch.tensor(wrong), torch.ones(1, 3))


WRONG = {
    "width": ({"x": torch.ones(2, 36)}, r"x: wrong shape\n  expected \(\.\.\., 37\) = \(\.\.\., H\)"),
    "whole-x": ({"x": torch.ones(2, 37).int()}, r"x: wrong dtype\n.*\n  got      int32"),
    "tokens": ({"topk_ids": torch.zeros(3, 2).long()}, r"topk_ids: wrong shape\n  expected \(2, k\)"),
    "flat-ids": ({"topk_ids": torch.zeros(2).long()}, "topk_ids: wrong shape"),
    "float-ids": ({"topk_ids": torch.zeros(2, 2)}, r"topk_ids: wrong dtype\n  expected int32 or int64"),
    "weights": ({"topk_weights": torch.ones(2, 3)}, r"topk_weights: wrong shape\n  expected \(2, 2\)"),
    "whole-weights": ({"topk_weights": torch.ones(2, 2).long()}, "topk_weights: wrong dtype"),
    "device": ({"x": torch.ones(2, 37, device="meta")}, r"x\n  expected a tensor on cpu"),
    "device-ids": ({"topk_ids": torch.ones(2, 2, device="meta").long()}, r"topk_ids\n  expected a tensor on"),
}


@pytest.mark.parametrize(("changed", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_input_is_named(changed: dict[str, Tensor], said: str) -> None:
    given = {
        "x": torch.ones(2, 37),
        "topk_ids": torch.zeros(2, 2, dtype=torch.int64),
        "topk_weights": torch.ones(2, 2),
    }

    with pytest.raises(QloadError, match=said):
        made("plain").get_linear()(**{**given, **changed})


def test_the_module_says_what_it_is() -> None:
    text = repr(made("gptq", kind="clamped_swiglu").get_linear())

    assert "experts=6, features=96, between=64" in text
    assert "gptq" in text
    assert "1.702" in text
