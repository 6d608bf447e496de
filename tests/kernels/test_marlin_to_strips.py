"""Marlin's order, asked for by name, is multiplied in strips on a device whose kernels read these."""

from importlib import import_module

import pytest
import torch

from qload import copy_into
from qload.kernel_formats import GPTQMarlinWeight, StripsWeight
from tests.kernels.cuda_layers import layer

pytestmark = pytest.mark.usefixtures("seen_logs")

LINEAR = import_module("qload.kernels.linear")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", "qload")
    return caplog


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act order"])
@pytest.mark.parametrize(
    ("capability", "kind"), [(80, StripsWeight), (90, StripsWeight), (75, GPTQMarlinWeight)]
)
def test_the_linear_has_the_order_with_kernels(
    capability: int,
    kind: type,
    act_order: bool,
    monkeypatch: pytest.MonkeyPatch,
    lines: pytest.LogCaptureFixture,
) -> None:
    weight = layer(256, 72, 64, 4, torch.float16, zeros=True, act_order=act_order)
    monkeypatch.setattr(LINEAR, "compute_capability", lambda device: capability)

    typed = weight.get_linear().typed

    assert type(typed) is kind
    assert torch.equal(typed.dequantize(), weight.dequantize())
    assert len(lines.messages) == (kind is StripsWeight)
    assert all("multiplied in strips" in line for line in lines.messages)


def test_groups_with_rows_elsewhere_stay_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    weight = layer(128, 64, 64, 4, torch.float16, act_order=True, share=2)
    monkeypatch.setattr(LINEAR, "compute_capability", lambda device: 80)

    assert type(weight.get_linear().typed) is GPTQMarlinWeight

    (line,) = lines.messages
    assert "stays in Marlin's order, and is dequantized above 16 tokens" in line
    assert "rows of its groups are on other ranks" in line


@pytest.mark.parametrize(("capability", "later"), [(80, None), (None, 80)])
def test_a_weight_is_copied_into_the_order_of_the_layer(
    capability: int | None, later: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LINEAR, "compute_capability", lambda device: capability)
    linear = layer(256, 72, 64, 4, torch.float16).get_linear()
    weight = layer(256, 72, 64, 4, torch.float16)
    weight.scales.mul_(2)
    monkeypatch.setattr(LINEAR, "compute_capability", lambda device: later)

    copy_into(linear, weight)

    assert torch.equal(linear.typed.dequantize(), weight.dequantize())
