"""Which calls the CPU module takes, and that all doors lead to it; tests/native has its results."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.devices.operands import Meaning
from qload.formats import (
    FORMATS,
    BNB4Config,
    BNBFP4Weight,
    BNBNF4Weight,
    EETQConfig,
    EETQWeight,
    Fp8Config,
    Fp8Weight,
)
from qload.kernel_formats import repack
from qload.kernels import cpu, products
from qload.native.modules import NativeModule
from qload.spec import Weight
from qload.testing import assert_same_bits
from tests.kernel_formats.marlin_layers import layer
from tests.kernels.ways_by_hand import Write, write_ways

__all__ = ["write_ways"]  # a fixture

WEIGHT: Any = repack(layer(64, 32, 32, sym=False), "panels")
FP8 = Fp8Weight(
    config=Fp8Config(), weight=torch.ones(32, 64).to(torch.float8_e4m3fn), weight_scale=torch.ones(1)
)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A module that says what it is asked, and of how many tokens, and leaves y as it is."""
    seen: list[tuple[str, int]] = []
    module: Any = SimpleNamespace(
        multiply=lambda isa, bits, sizes, *rest: seen.append(("panels", sizes[0])),
        multiply_rows=lambda isa, bits, sizes, *rest: seen.append(("rows", sizes[0])),
    )
    monkeypatch.setattr(cpu, "load", lambda name: NativeModule(module))
    monkeypatch.setattr(cpu, "isa", lambda: "avx2")
    monkeypatch.setattr(cpu, "has_routines", lambda *tensors: True)
    return seen


def inputs(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_a_module_calls_it_with_or_without_a_bias(here: list[tuple[str, int]]) -> None:
    for weight in (WEIGHT, FP8):
        for bias in (None, torch.ones(32), torch.ones(32).half()):
            assert weight.get_linear(bias=bias)(inputs(2, 3)).shape == (2, 3, 32)

    assert here == [("panels", 6)] * 3 + [("rows", 6)] * 3


def test_the_operator_calls_it_too(here: list[tuple[str, int]]) -> None:
    module = WEIGHT.get_linear()
    held = [WEIGHT.fields()[name] for name in module._call.names]

    assert torch.ops.qload.linear(inputs(3), held, None, module._key, 32).shape == (3, 32)

    assert here == [("panels", 3)]


def test_gradients_are_those_of_the_weight() -> None:
    x = inputs(2, dtype=torch.float32).requires_grad_()

    WEIGHT.get_linear()(x).sum().backward()

    assert x.grad is not None
    assert_same_bits(x.grad, torch.ones(2, 32) @ WEIGHT.dequantize())


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        pytest.param(inputs(2, dtype=torch.float64), WEIGHT, None, id="float64"),
        pytest.param(inputs(2).requires_grad_(), WEIGHT, None, id="gradients of x"),
        pytest.param(inputs(2), WEIGHT, torch.ones(32).requires_grad_(), id="gradients of a bias"),
        pytest.param(inputs(2), layer(64, 32, 32), None, id="another order"),
        pytest.param(
            inputs(2),
            WEIGHT.holding({"scales": WEIGHT.scales.repeat_interleave(2, 1)[:, ::2]}),
            None,
            id="scales apart",
        ),
        pytest.param(inputs(2), FP8.holding({"weight": FP8.weight.T.contiguous().T}), None, id="columns"),
        pytest.param(inputs(2).to("meta"), WEIGHT.to("meta"), None, id="no memory"),
    ],
)
def test_what_it_does_not_take(
    here: list[tuple[str, int]], x: Tensor, weight: Any, bias: Tensor | None
) -> None:
    assert cpu.multiply(x, weight, bias) is None
    assert here == []


def test_it_takes_the_types_of_activations_and_not_within_the_reference(here: list[tuple[str, int]]) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert cpu.multiply(inputs(2, dtype=dtype), WEIGHT, torch.ones(32)) is not None
    with native.reference():
        assert cpu.multiply(inputs(2), WEIGHT) is None
    assert len(here) == 3


def test_tokens_go_the_way_that_the_table_says(here: list[tuple[str, int]], write_ways: Write) -> None:
    eight: Any = repack(layer(64, 32, 32, bits=8), "panels")
    ours, torchs = ("cache", "torch"), ("torch", "cache")
    table = {("rows", 8, "bfloat16", "avx2"): [(16, ours), (64, torchs)]}
    table |= {("panels", 8, "bfloat16", "avx2"): [(64, ours), (128, torchs)]}
    write_ways(table)

    for weight, most in ((FP8, 16), (eight, 64)):
        linear = weight.get_linear()
        for call in (lambda x, linear=linear: linear(x), lambda x, weight=weight: cpu.multiply(x, weight)):
            here.clear()
            for M in (most, most + 1, 300):
                call(inputs(M, dtype=torch.bfloat16))
            assert here == [("rows" if weight is FP8 else "panels", most)]
        for dtype in (torch.float16, torch.float32):
            assert cpu.multiply(inputs(300, dtype=dtype), weight) is not None
    assert cpu.multiply(inputs(300, dtype=torch.bfloat16), WEIGHT) is not None


@pytest.mark.usefixtures("here")
def test_every_no_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = WEIGHT.holding({})
    object.__setattr__(empty, "layer", type(WEIGHT.layer)((0,), 64, (0, 64)))

    assert cpu.why_not(WEIGHT, torch.float16) is None
    assert cpu.why_not(FP8, torch.float16) is None
    assert str(cpu.why_not(WEIGHT, torch.float64)).endswith("float32, float16 or bfloat16, got float64")
    assert cpu.why_not(layer(64, 32, 32), torch.float16) == "no CPU kernel reads GPTQWeight"
    assert cpu.why_not(empty, torch.float16) == "a weight of shape (0, 64) has no elements"
    monkeypatch.setattr(cpu, "load", lambda name: NativeModule(None, "not built"))
    assert cpu.why_not(WEIGHT, torch.float16) == "the CPU module is not built"


def test_without_the_module_every_weight_is_multiplied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load", lambda name: NativeModule(None, "not built"))
    x = inputs(3, dtype=torch.float32)

    for weight in (WEIGHT, FP8):
        assert_same_bits(weight.get_linear()(x), products.multiply(x, weight))


def test_what_is_multiplied_is_a_format_or_panels() -> None:
    types: set[type[Weight]] = {*cpu.TYPES}
    assert types - {*FORMATS} == {type(WEIGHT)}


@pytest.mark.parametrize("kind", [BNBNF4Weight, BNBFP4Weight])
def test_codes_of_four_bits_that_are_a_byte_each_have_a_table_of_all_bytes(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that end within blocks: each element has a scale, and kernels read the table's 256 values."""
    monkeypatch.setattr(cpu, "has_routines", lambda *tensors: True)
    table = torch.linspace(-1, 1, 16)
    config = BNB4Config(quant_type=kind.format.removeprefix("bnb_"), blocksize=64, K=16)
    stored = torch.randint(256, (256, 1), dtype=torch.uint8)

    rows = cpu.rows_of(kind(config=config, weight=stored, absmax=torch.ones(8), quant_map=table))

    assert rows is not None
    assert (rows.bits, rows.meaning.lookup.shape) == (8, (256,))  # type: ignore[union-attr]
    assert torch.equal(rows.meaning.lookup[:16], table)  # type: ignore[index]
    assert rows.meaning.lookup[16:].isnan().all()  # type: ignore[index]


class Asked:
    """Counts who asks what the codes of an FP8 layer mean: its scale becomes another tensor, they do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(cpu, "rows_of", self)

    def __call__(self, weight: Any) -> cpu.CodeRows:
        self.count += 1
        meaning = scaled_by(weight.weight_scale.reshape(1, 1).clone())
        return cpu.CodeRows(weight.weight.view(torch.uint8), 8, False, meaning)


def scaled_by(scales: Tensor) -> Meaning:
    return Meaning(scales, None, None, None, None, run=64, divide=False, factor=1.0)


def fp8() -> Any:
    return FP8.holding({"weight_scale": torch.ones(1), "weight": FP8.weight.clone()})


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda scale: scale.mul_(2),
    "to data": lambda scale: scale.data.copy_(torch.tensor([2.0])),
    "by numpy": lambda scale: scale.numpy().fill(2),
}


def test_what_codes_mean_is_found_once_for_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, kept, weight = Asked(monkeypatch), cpu.KeptRows(), fp8()

    first = kept.of(weight)
    assert kept.of(weight) is first
    assert kept.of(weight.holding({"weight": weight.weight.view(weight.weight.dtype)})) is first
    assert asked.count == 1


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_what_became_another_tensor_is_seen(
    write: str, inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    with torch.inference_mode(inference):
        kept, weight = cpu.KeptRows(), fp8()
        kept.of(weight)
        WRITES[write](weight.weight_scale)

        assert kept.of(weight).meaning.scales.item() == 2  # type: ignore[union-attr]
        assert asked.count == 2


def test_codes_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, kept, weight = Asked(monkeypatch), cpu.KeptRows(), fp8()
    kept.of(weight)
    weight.weight.data.fill_(1)
    assert kept.of(weight).bytes.eq(weight.weight.view(torch.uint8)).all()  # type: ignore[union-attr]
    assert asked.count == 1


@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_another_tensor_is_asked_about(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, kept, weight = Asked(monkeypatch), cpu.KeptRows(), fp8()
    kept.of(weight)

    other = weight.holding({name: getattr(weight, name).clone()})

    read = kept.of(other)
    assert read.bytes.data_ptr() == other.weight.data_ptr()  # type: ignore[union-attr]
    assert asked.count == 2


@pytest.mark.skipif(native.load("cpu").found is None, reason="needs the CPU module")
def test_a_layer_whose_codes_become_others_multiplies_by_the_new_ones() -> None:
    stored = torch.randint(-128, 127, (64, 64), dtype=torch.int8)
    weight = EETQWeight(config=EETQConfig(), weight=stored, weight_scales=torch.ones(64).half())
    linear, x = weight.get_linear(), inputs(2, dtype=torch.float32)
    linear(x)
    stored.data.copy_(~stored)

    assert_same_bits(linear(x), weight.get_linear()(x))


def test_nothing_is_kept_where_codes_become_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, kept, weight = Asked(monkeypatch), cpu.KeptRows(), fp8()
    meaning = scaled_by(weight.weight_scale)

    def copied(weight: Any) -> cpu.CodeRows:
        asked.count += 1
        return cpu.CodeRows(weight.weight.view(torch.uint8).clone(), 8, False, meaning)

    monkeypatch.setattr(cpu, "rows_of", copied)
    kept.of(weight)
    kept.of(weight)

    assert asked.count == 2


@pytest.mark.skipif(native.load("cpu").found is None, reason="needs the CPU module")
def test_a_layer_that_is_written_to_is_multiplied_as_it_is() -> None:
    weight = FP8.holding({"weight_scale": torch.ones(1)})
    linear, x = weight.get_linear(), inputs(2)
    before = linear(x)

    weight.weight_scale.mul_(2)

    assert_same_bits(linear(x), 2 * before)


@pytest.mark.usefixtures("here")
def test_a_module_keeps_what_its_codes_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Weight] = []
    found = cpu.rows_of
    monkeypatch.setattr(cpu, "rows_of", lambda weight: asked.append(weight) or found(weight))
    linear = FP8.get_linear()

    for M in (1, 2, 3):
        linear(inputs(M))

    assert len(asked) == 1
