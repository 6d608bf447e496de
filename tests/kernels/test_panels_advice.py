"""The advice to repack for the CPU module: once, and only where panels would multiply faster."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qload import native
from qload.detect import loader_from_config
from qload.errors import RepackError
from qload.formats import GPTQWeight, UnquantizedWeight
from qload.kernel_formats import PanelsWeight, repack
from qload.kernels import cpu
from qload.layouts import StoredMinusOneUnmasked
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import Traits, layer_of
from qload.weights import Weights
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.usefixtures("seen_texts", "seen_logs")

BRAIN = torch.bfloat16
ADVICE = 'target="auto" of open_checkpoint, or repack(weight, "panels")'


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU module that multiplies panels, whose products are zeros, and nothing that lies in rows."""
    found = native.NativeModule(SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(cpu, "load", lambda name: found)
    monkeypatch.setattr(cpu, "isa", lambda: "avx512")
    monkeypatch.setattr(cpu, "rows_of", lambda weight: None)
    monkeypatch.setattr(cpu.PanelsPlan, "product", lambda plan, way, x, *rest: x.new_zeros(len(x), plan.N))
    monkeypatch.setattr(cpu, "_advised", set())
    monkeypatch.setattr(cpu, "_refused", set())
    return


def multiply(weight: Weight, dtype: torch.dtype = BRAIN, tokens: int = 1) -> None:
    weight.get_linear()(torch.ones(tokens, weight.shape[1], dtype=dtype))


def named(weight: Any, name: str) -> Any:
    return replace(weight, layer=replace(weight.layer, name=name))


def advice(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if ADVICE in record.getMessage()]


def test_it_is_logged_once_for_a_format_and_a_dtype_over_many_layers_and_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = [named(Case(seed=seed).weight(), f"layers.{seed}.up") for seed in range(4)]

    for _ in range(2):
        for layer in layers:
            multiply(layer)
    assert len(advice(caplog)) == 1
    assert advice(caplog)[0].startswith("layers.0.up: gptq is dequantized for each product with bfloat16")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]

    for layer in layers:
        multiply(layer, torch.float16)
    assert len(advice(caplog)) == 2
    assert "gptq is dequantized for each product with float16" in advice(caplog)[1]


@pytest.mark.parametrize("format", ["awq", "ct_pack", "marlin"])
def test_other_formats_of_packed_integers_have_it_too(format: str, caplog: pytest.LogCaptureFixture) -> None:
    layer = layer_of(Traits(format, group_size=128), 256, 256).weight()

    multiply(layer)
    assert len(advice(caplog)) == 1
    assert layer.format in advice(caplog)[0]


def weights(target: Any) -> Weights:
    tensors = {f"up.{name}": tensor for name, tensor in Case().weight().fields().items()}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    return Weights(MemoryStorage(tensors), loader=loader_from_config(config, target=target))


def test_a_layer_that_is_loaded_with_a_target_has_none(caplog: pytest.LogCaptureFixture) -> None:
    for target in ("auto", "panels"):
        layer = weights(target).get_weights("up")
        assert isinstance(layer, PanelsWeight)
        multiply(layer)
    multiply(weights("marlin").get_weights("up"))
    assert not advice(caplog)

    multiply(weights(None).get_weights("up"))
    assert len(advice(caplog)) == 1


def refused_zero_points() -> GPTQWeight:
    """Zero points of 256, which a byte does not hold."""
    weight = Case(bits=8, zeros=StoredMinusOneUnmasked()).weight()
    return replace(weight, qzeros=torch.full_like(weight.qzeros, -1))


def refused_order() -> GPTQWeight:
    """Groups of 31 and of 33 rows."""
    weight = Case(act_order=True).weight()
    g_idx = weight.g_idx
    assert g_idx is not None
    moved = g_idx.clone()
    moved[(g_idx == 0).nonzero()[0]] = 1
    return replace(weight, g_idx=moved)


@pytest.mark.parametrize("make", [refused_zero_points, refused_order])
def test_a_layer_that_panels_refuse_has_none_and_is_read_once(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, asked = make(), []
    why_not = cpu.find_unsupported_panels
    monkeypatch.setattr(cpu, "find_unsupported_panels", lambda each: (asked.append(each), why_not(each))[1])
    with pytest.raises(RepackError, match="panels"):
        repack(weight, "panels")

    for _ in range(3):
        multiply(weight)
    assert not advice(caplog)
    assert len(asked) == 1


def test_plain_weights_and_what_the_module_cannot_multiply_have_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    multiply(UnquantizedWeight(weight=torch.ones(4, 256)))
    multiply(Case().weight(), torch.float64)
    with native.reference():
        multiply(Case().weight())
    monkeypatch.setattr(cpu, "ranked", lambda *call: (cpu.TORCH,))
    multiply(Case().weight())
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "load", lambda name: native.NativeModule(None, "not built"))
    multiply(Case().weight())

    assert not advice(caplog)
