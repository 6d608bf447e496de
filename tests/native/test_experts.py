"""Experts of every format that the CPU module multiplies, by every instruction set that is here."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qload import native
from qload.errors import RepackError
from qload.experts import ExpertsWeight, LocalExperts
from qload.experts.weight import stacked
from qload.formats import GPTQWeight, UnquantizedWeight
from qload.kernels import bounds, cpu, experts_function
from qload.kernels.bounds import excess
from qload.kernels.cpu import ROW_TYPES, KeptRows, rows_of
from qload.spec import Weight
from qload.testing import assert_same_bits
from tests.experts.drawn import choices
from tests.experts.expert_layers import experts
from tests.experts.test_module_whole import E, drawn, made
from tests.native.memory import ISAS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOKENS = (1, 9, 40)  # of which an expert has 1, some, more than registers are for, and blocks of them
STACKS = ("gate_up", "down")
every_format = pytest.mark.parametrize("format", ["panels", "fp8", "mxfp4"])
every_side = pytest.mark.parametrize("side", ["output", "input"])


@contextmanager
def nothing_dequantized() -> Iterator[None]:
    """Inside, a product of torch with the matrix of an expert fails."""

    def refused(*given: Any) -> Tensor:
        raise AssertionError("a matrix of an expert was left to torch")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts_function, "product", refused)
        yield


def multiplied(weight: ExpertsWeight, *read: Tensor, isa: str | None = None, threads: int = 1) -> Tensor:
    module = weight.get_linear(activations="unquantized")
    with native.using(isa, threads), nothing_dequantized():
        y: Tensor = module(*read)
    return y


def assert_within(weight: ExpertsWeight, y: Tensor, *read: Tensor) -> None:
    """As far off as sums in float32 explain, of weights that no type of 16 bits rounds."""
    __tracebackhide__ = True
    assert y.dtype == read[0].dtype
    assert bool((excess(y, bounds.of_experts(*read, weight, "unquantized")) <= 1).all())


@ISAS
@every_format
@every_side
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_are_as_close_as_rounding_allows(
    isa: str, format: str, side: str, dtype: torch.dtype
) -> None:
    for kind in ("silu", "clamped_swiglu"):
        weight = made(format, kind=kind, side=side, biased=True)
        for tokens in TOKENS:
            read = drawn(weight, tokens, dtype)
            assert_within(weight, multiplied(weight, *read, isa=isa), *read)


@pytest.mark.parametrize(
    "weight_type", [GPTQWeight, *ROW_TYPES], ids=lambda weight_type: str(weight_type.format)
)
@given(data=st.data())
@settings(max_examples=3)
def test_experts_of_every_format_that_has_a_kernel(weight_type: type[Weight], data: Any) -> None:
    weight: ExpertsWeight = data.draw(experts(weight_type)).load()
    if weight_type is GPTQWeight:
        try:
            weight = weight.repack("panels")
        except RepackError:  # of what panels cannot hold
            return
    elif any(rows_of(each) is None for name in STACKS for each in getattr(weight, name)):
        assert weight_type.format in (
            "ct_pack",
            "ct_pack_tensor",
            "modelopt_awq",
        )  # of which some lie otherwise
        return
    count, H, _ = weight.shape
    chance = torch.Generator().manual_seed(count)
    for dtype in (torch.float32, torch.bfloat16):  # which hold whatever is drawn
        ids, weights = choices(5, count, max(1, count - 1), chance)
        read = torch.randn(5, H, generator=chance).to(dtype), ids, weights
        assert_within(weight, multiplied(weight, *read), *read)


@ISAS
@every_format
def test_threads_change_no_bit(isa: str, format: str) -> None:
    weight = made(format)
    read = drawn(weight, 200)  # work for several threads
    alone = multiplied(weight, *read, isa=isa)

    for threads in (2, 3):
        assert_same_bits(multiplied(weight, *read, isa=isa, threads=threads), alone)


@ISAS
@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_that_is_not_finite_spoils_no_other(isa: str, format: str, dtype: torch.dtype) -> None:
    weight = made(format)
    for tokens in (3, 40):
        x, ids, weights = drawn(weight, tokens, dtype)
        want = multiplied(weight, x, ids, weights, isa=isa)
        x[1, 5] = torch.nan
        y = multiplied(weight, x, ids, weights, isa=isa)

        assert y[1].isnan().all()
        others = torch.arange(tokens) != 1
        assert_same_bits(y[others], want[others])


@ISAS
@every_format
def test_experts_that_no_token_chose_are_not_read(isa: str, format: str) -> None:
    weight, read = made(format, biased=True), drawn(made(format), 1)
    want = multiplied(weight, *read, isa=isa)
    chosen = set(read[1].flatten().tolist())
    for each in (weight.gate_up_bias, weight.down_bias, *scales(weight)):
        for expert in set(range(E)) - chosen:
            assert each is not None
            each[expert] = 255 if each.dtype == torch.uint8 else torch.nan

    assert_same_bits(multiplied(weight, *read, isa=isa), want)


def scales(weight: ExpertsWeight) -> Iterator[Tensor]:
    for name in STACKS:
        yield from (each for field, each in getattr(weight, name).fields().items() if "scale" in field)


@ISAS
@every_format
@pytest.mark.parametrize("tokens", [1, 9])
def test_each_expert_is_multiplied_as_a_layer_of_its_own(isa: str, format: str, tokens: int) -> None:
    """What goes between the products is float32, and their bits are those that the layers give."""
    weight = made(format)
    x, act = drawn(weight, tokens)[0], weight.facts.activation
    for expert in (0, E - 1):
        gate_up, down = (each.get_linear(activations="unquantized") for each in weight.expert(expert))
        with native.using(isa, 1), torch.no_grad():
            between = act(*gate_up(x).chunk(2, dim=-1))
            want = down(between)

        ids, ones = torch.full((tokens, 1), expert), torch.ones(tokens, 1)
        assert_same_bits(multiplied(weight, x, ids, ones, isa=isa), want)


@ISAS
@every_side
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_goes_into_products_is_bfloat16_for_tokens_of_it(
    isa: str, side: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.dtype, torch.dtype | None]] = []
    own = cpu.PanelsPlan.multiply

    def multiply(plan: cpu.PanelsPlan, x: Tensor, *rest: Any, **more: Any) -> Tensor | None:
        y = own(plan, x, *rest, **more)
        assert y is not None
        seen.append((x.dtype, y.dtype))
        return y

    monkeypatch.setattr(cpu.PanelsPlan, "multiply", multiply)
    weight = made("panels", side=side)
    multiplied(weight, *drawn(weight, 1, dtype), isa=isa)

    between = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    first = between if side == "input" else dtype  # which meets a routing weight of float32
    assert seen == [(each, torch.float32) for each in [first] * 3 + [between] * 3]


def test_rows_that_torch_would_multiply_faster_are_not_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would round what comes out of a product."""

    def ranked(kind: str, bits: int, dtype: torch.dtype, isa: str, tokens: int) -> tuple[str, ...]:
        return ("cache",) if dtype == torch.float32 else ("torch", "cache")

    monkeypatch.setattr(cpu, "ranked", ranked)
    weight = made("mxfp4")
    for dtype in (torch.bfloat16, torch.float16):
        read = drawn(weight, 9, dtype)
        assert_within(weight, multiplied(weight, *read), *read)


@every_format
def test_what_a_module_keeps_of_experts_follows_every_write(format: str) -> None:
    weight, other = made(format), made(format)
    read, module = drawn(weight, 3), weight.get_linear()
    for each in scales(other):
        each.copy_(each.flip(1))
    want = other.get_linear()(*read)
    assert not torch.equal(module(*read), want)

    for mine, theirs in zip(scales(weight), scales(other), strict=True):
        mine.copy_(theirs)
    assert_same_bits(module(*read), want)
    for name, tensor in module.named_buffers():
        tensor.data = made(format).get_linear().get_buffer(name).clone()
    assert_same_bits(module(*read), made(format).get_linear()(*read))
    module.load_state_dict(other.get_linear().state_dict(), assign=True)
    assert_same_bits(module(*read), want)


def test_a_module_asks_once_what_the_codes_of_an_expert_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    own = KeptRows.of
    weight = made("mxfp4")
    read, module = drawn(weight, 3), weight.get_linear()
    kept = set[int]()

    def of(self: KeptRows, matrix: Weight) -> Any:
        asked.append(matrix.layer.name)
        kept.add(id(self))
        return own(self, matrix)

    monkeypatch.setattr(KeptRows, "of", of)
    with nothing_dequantized():
        module(*read)
        once = len(kept)
        module(*read)

    assert once == len(set(asked)) == len(kept)
    assert len(asked) == 2 * once


def test_a_share_has_its_own_experts() -> None:
    whole, share = made("panels"), made("panels", local=LocalExperts(2, 5, E))
    read = drawn(whole, 9)
    y = multiplied(share, *read)

    assert_within(share, y, *read)
    elsewhere = ((read[1] < 2) | (read[1] >= 5)).all(1)
    assert_same_bits(y[elsewhere], torch.zeros_like(y[elsewhere]))


@every_format
def test_gradients_are_those_of_the_weights(format: str) -> None:
    weight = made(format)
    x, ids, weights = drawn(weight, 3)
    x.requires_grad_()

    weight.get_linear()(x, ids, weights).sum().backward()

    plain = replace(made("plain"), **{name: in_plain(getattr(weight, name)) for name in STACKS})
    other = x.detach().clone().requires_grad_()
    plain.get_linear()(other, ids, weights).sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    assert_same_bits(x.grad, other.grad)


def in_plain(stack: Any) -> Any:
    own = (UnquantizedWeight(weight=each.dequantize(), layer=each.layer) for each in stack)
    return stacked(stack.layer.name, len(stack), own)
