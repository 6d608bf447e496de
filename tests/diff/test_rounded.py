"""A quantized layer beside a plain one of a narrow type: equal after one rounding, in every run or not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qload import convert, diff
from qload.diff import comparison
from qload.diff.comparison import ValueDiff, rounds_to
from qload.formats import UnquantizedConfig, UnquantizedWeight
from qload.testing import make_checkpoint
from tests.diff.test_codes import awq

pytestmark = pytest.mark.usefixtures("seen_texts")

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A checkpoint of codes and what bfloat16 makes of it, to be compared 8 outputs at a time."""
    one, other = tmp_path / "coded", tmp_path / "plain"
    make_checkpoint("gptq", one, config={"num_hidden_layers": 1})
    assert convert(one, other, to="bfloat16", rounding=True).verdict == "ok"
    monkeypatch.setattr(comparison, "MAX_ELEMENTS", 8 * 64)
    return one, other


def plain(values: torch.Tensor) -> UnquantizedWeight:
    return UnquantizedWeight(config=UnquantizedConfig(), weight=values)


def test_each_run_counts(both):
    found = next(layer for layer in diff(*both).layers if layer.name == UP)

    assert (found.outcome, found.differing) == ("rounded", 0)
    assert found.total == load_file(both[1] / "model.safetensors")[f"{UP}.weight"].numel()


def test_few_outputs_show_that_a_layer_is_rounded(tmp_path, monkeypatch):
    one, other = tmp_path / "coded", tmp_path / "plain"
    make_checkpoint("gptq", one, config={"num_hidden_layers": 1})
    stored = load_file(one / "model.safetensors")
    inexact = {name: each.fill_(0.3) for name, each in stored.items() if name.endswith(".scales")}
    largest = {name: each.fill_(-1) for name, each in stored.items() if name.endswith(".qweight")}
    save_file({**stored, **inexact, **largest}, one / "model.safetensors", {"format": "pt"})
    convert(one, other, to="bfloat16", rounding=True)
    looked: list[int] = []
    add = ValueDiff.add

    def added(found: ValueDiff, start: int, got: torch.Tensor, *more: Any) -> None:
        looked.append(len(got))
        add(found, start, got, *more)

    monkeypatch.setattr(ValueDiff, "add", added)

    assert diff(one, other).counts["rounded"] == len(inexact)
    assert looked.count(8) == len(inexact)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_last_value_of_the_last_run_is_seen(both, swapped):
    file = both[1] / "model.safetensors"
    stored = load_file(file)
    weight = stored[f"{UP}.weight"]
    weight[-1, -1] = weight[-1, -1] * 1.01 + 1
    save_file(stored, file, {"format": "pt"})

    found = next(layer for layer in diff(*(both[::-1] if swapped else both)).layers if layer.name == UP)

    N, K = weight.shape
    assert (found.outcome, found.differing, found.total) == ("differs", 1, N * K)
    assert f"({N - 1}, {K - 1})" in found.detail


def test_both_orders_are_asked_and_equal_bits_alone_will_do():
    coded = awq()
    near = plain(coded.dequantize(torch.bfloat16))
    other = near.weight.clone()
    other[3, 5] += 1

    assert rounds_to(coded, near, torch.bfloat16)
    assert rounds_to(near, coded, torch.bfloat16)
    assert not rounds_to(coded, plain(other), torch.bfloat16)
    assert not rounds_to(coded, near, torch.float16)
    assert not rounds_to(near, near, torch.bfloat16)
    assert not rounds_to(coded, coded, torch.bfloat16)


def test_zeros_of_either_sign_are_equal_once_rounded_and_not_in_bits():
    found = ValueDiff()
    found.add(0, torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), torch.bfloat16)

    assert (found.outcome, found.differing) == ("rounded", 0)


def test_nan_is_equal_to_nan_once_rounded():
    found = ValueDiff()
    found.add(0, torch.tensor([torch.nan, 1.001]), torch.tensor([torch.nan, 1.002]), torch.bfloat16)

    assert (found.outcome, found.differing) == ("rounded", 0)
