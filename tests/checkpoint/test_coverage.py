"""Every byte is read, exempt, not read, refused or left over; the ledger of loads and verify say the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.checkpoint import Account, LayerIndex, account
from qload.cli.tables import verdict_text
from qload.cli.text import format_percent
from qload.detect import loader_from_config
from qload.errors import QloadError
from qload.experts import with_experts
from qload.storage import MemoryStorage
from qload.verify import inspect, verify
from qload.weights import Weights
from tests.verify.checkpoints import GPTQ, gptq, model, plain, rules

pytestmark = pytest.mark.usefixtures("seen_texts")

LAYER = "model.layers.0"
KNOWN: dict[str, Tensor] = {
    **gptq(f"{LAYER}.self_attn.k_proj"),
    **plain(f"{LAYER}.self_attn.sinks", "lm_head.weight"),
    f"{LAYER}.self_attn.k_proj.bias": torch.ones(8),
    f"{LAYER}.norm.weight": torch.ones(4),
}
CACHE = {f"{LAYER}.self_attn.k_proj.k_scale": torch.ones(())}
BUFFER = {f"{LAYER}.self_attn.position_ids": torch.arange(4)[None]}
FUSED = {
    f"{LAYER}.mlp.experts.gate_up_proj": torch.ones(2, 4, 8).to(torch.int8),
    f"{LAYER}.mlp.experts.gate_up_proj_weight_scale": torch.ones(()),
}
LEFT = {f"{LAYER}.self_attn.k_proj.weight_scale": torch.ones(8)}
BROKEN = {f"{LAYER}.up.qweight": torch.ones(2, 8).int(), f"{LAYER}.up.bias": torch.ones(8)}
LOST = {f"{LAYER}.rest": torch.ones(2, 2, dtype=torch.int8)}


def held(*tensors: dict[str, Tensor]) -> Weights:
    everything = {name: tensor for each in tensors for name, tensor in each.items()}
    storage = with_experts(MemoryStorage(everything), {})
    return Weights(storage, loader=loader_from_config(GPTQ))


def accounted(*tensors: dict[str, Tensor]) -> Account:
    return account(LayerIndex(held(*tensors)))


def size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_all_of_a_checkpoint_is_explained_where_formats_and_names_know_it() -> None:
    coverage = accounted(KNOWN, CACHE, BUFFER).coverage

    assert (coverage.layers, coverage.plain_tensors) == (3, 4)
    assert (coverage.read, sum(coverage.exempt.values())) == (size(KNOWN), size(CACHE) + size(BUFFER))
    assert coverage.explained == coverage.total == size(KNOWN) + size(CACHE) + size(BUFFER)
    assert (coverage.unread, coverage.refused, coverage.unexplained) == (0, 0, 0)


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        pytest.param(FUSED, "unread", id="experts in one tensor"),
        pytest.param(LEFT, "unexplained", id="beside a layer's own"),
        pytest.param(LOST, "unexplained", id="of no layer"),
        pytest.param(BROKEN, "refused", id="a broken layer"),
    ],
)
def test_what_is_not_explained_is_counted_once_and_by_what_it_is(
    tensors: dict[str, Tensor], part: str
) -> None:
    coverage = accounted(KNOWN, tensors).coverage

    parts = {name: getattr(coverage, name) for name in ("unread", "unexplained", "refused")}
    assert parts == {**dict.fromkeys(parts, 0), part: size(tensors)}
    assert coverage.explained == coverage.read == size(KNOWN)
    assert coverage.total == size(KNOWN) + size(tensors)


def test_what_is_left_over_is_a_finding_of_inspect_and_verify(tmp_path: Path) -> None:
    folder = model(tmp_path, {**KNOWN, **LEFT, **LOST}, quantization_config=GPTQ)

    for report in (inspect(folder), verify(folder)):
        found = {each.tensor: each.message for each in report.findings if each.rule == "unexplained-tensor"}
        assert found.keys() == LEFT.keys() | LOST.keys()
        assert "not a tensor of a gptq layer" in found[next(iter(LEFT))]
        assert "int8 (2, 2) belongs to no layer" in found[next(iter(LOST))]


def test_loads_and_verify_say_the_same_of_the_same_tensor() -> None:
    weights = held(KNOWN, CACHE, BUFFER, FUSED, LEFT, LOST)
    told = account(LayerIndex(weights)).report

    assert not weights.report().used
    for prefix, layer in LayerIndex(weights).layers.items():
        assert not isinstance(layer, QloadError)
        weights.get_weights(prefix)
    for name in (f"{LAYER}.self_attn.sinks", f"{LAYER}.self_attn.k_proj.bias"):
        weights.get_tensor(name)

    assert weights.report() == told
    assert told.unread.keys() == FUSED.keys()
    assert told.exempted.keys() == CACHE.keys() | BUFFER.keys()
    assert told.unused == sorted([*LEFT, *LOST])
    assert "2 not read" in str(told)
    assert not told.complete
    assert not accounted(KNOWN, FUSED).report.complete
    assert accounted(KNOWN, CACHE).report.complete


def test_an_exemption_that_is_plugged_in_is_verifys_too() -> None:
    weights = held(KNOWN, LOST)
    weights.exempt_by(lambda name: "of a layer that predicts ahead" if name.endswith("rest") else None)

    told = account(LayerIndex(weights))

    assert told.coverage.exempt == {"of a layer that predicts ahead": size(LOST)}
    assert told.report.exempted == {f"{LAYER}.rest": "of a layer that predicts ahead"}
    assert weights.report().exempted == told.report.exempted
    assert not told.unexplained


def test_plain_floats_that_are_exempt_are_not_read() -> None:
    rest = {f"{LAYER}.rest": torch.ones(2, 2)}
    weights = held(KNOWN, rest)
    before = account(LayerIndex(weights)).coverage
    weights.exempt_by(lambda name: "of a layer that predicts ahead" if name.endswith("rest") else None)
    after = account(LayerIndex(weights)).coverage

    assert (before.plain_tensors, before.read) == (after.plain_tensors + 1, after.read + size(rest))
    assert after.exempt == {"of a layer that predicts ahead": size(rest)}


def test_what_a_layer_has_is_not_exempt_for_its_dtype() -> None:
    """An index and a shape are whole numbers as buffers are, and a load has to use them."""
    weights = held(gptq("a"))

    assert weights.report().unused == sorted(gptq("a"))


def test_stacks_that_there_is_a_format_for_are_not_said_to_have_none() -> None:
    stack = {
        "a.experts.down_proj_blocks": torch.zeros(2, 8, 1, 16, dtype=torch.uint8),
        "a.experts.down_proj_scales": torch.full((2, 8, 1), 127, dtype=torch.uint8),
    }
    weights = Weights(MemoryStorage(stack), loader=loader_from_config({"quant_method": "mxfp4"}))

    assert weights.report().unused == sorted(stack)
    assert account(LayerIndex(weights)).report.used == sorted(stack)


def shown(folder: Path) -> str:
    return verdict_text(inspect(folder)).plain


def test_the_verdict_line_counts_and_never_says_all_of_what_was_not_read(tmp_path: Path) -> None:
    known, fused = tmp_path / "known", tmp_path / "fused"
    for folder, tensors in ((known, KNOWN), (fused, {**KNOWN, **FUSED})):
        folder.mkdir()
        model(folder, tensors, quantization_config=GPTQ)

    assert shown(known) == f"ok  {known}: 3 layers, 4 plain tensors, 100 % of {size(KNOWN)} B explained"
    line = shown(fused)
    assert line.startswith(f"incomplete  {fused}: 1 note; 3 layers, 4 plain tensors, ")
    assert "100 %" not in line
    assert line.endswith(f"{format_percent(size(FUSED), size(FUSED) + size(KNOWN))} not read")
    (note,) = inspect(fused).notes
    assert f"they hold {size(FUSED)} of {size(FUSED) + size(KNOWN)} bytes" in note


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (10**6 - 1, 10**6, "99.9 %"), (1, 10**6, "0.1 %"), (1, 3, "33.3 %"), (1, 2, "50 %"),
        (0, 5, "0 %"), (5, 5, "100 %"), (0, 0, "100 %"),
    ],
)  # fmt: skip
def test_a_share_is_rounded_away_from_nothing_and_all(part: int, whole: int, text: str) -> None:
    assert format_percent(part, whole) == text


def test_the_numbers_are_in_the_json(tmp_path: Path) -> None:
    report = verify(model(tmp_path, {**KNOWN, **CACHE, **FUSED}, quantization_config=GPTQ))

    told: dict[str, Any] = report.to_json()["coverage"]
    assert rules(report) == set()
    assert (told["layers"], told["plain_tensors"]) == (3, 4)
    assert told["explained"] == size(KNOWN) + size(CACHE)
    assert (told["unread"], told["total"]) == (size(FUSED), size(KNOWN) + size(CACHE) + size(FUSED))
    assert list(told["exempt"].values()) == [size(CACHE)]
    assert verify(tmp_path / "nowhere").to_json()["coverage"] is None
