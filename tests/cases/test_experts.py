"""The experts of every foreign model: what each layer means alone, its owner's numbers, whole and shared."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qload import ExpertsWeight, FakeWorld, Weights, open_checkpoint
from qload.errors import CutError, DivideError
from qload.testing import assert_same_bits
from tests.cases.test_cases import FOLDER
from tests.cases.test_models import EXPECTED, assert_rounded, every_model, published, refused
from tests.experts.expert_layers import assert_joined
from tests.format_cases import lawful

pytestmark = pytest.mark.skipif(not FOLDER, reason="QLOAD_CASES names no folder of cases")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\..+")


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Iterator[Weights]:
    """A model that has experts, each of which is stored, or shown, as layers of its own."""
    if refused(folder) is not None:
        pytest.skip("refused by name")
    with open_checkpoint(published(folder, tmp_path / "model")) as weights:
        if not prefixes(weights):
            pytest.skip("has no experts of their own")
        yield weights


def prefixes(weights: Weights) -> list[str]:
    """What the names of each layer's experts begin with."""
    return sorted({found[1] for name in weights.storage.keys() if (found := EXPERT.fullmatch(name))})  # noqa: SIM118


def seen_by(weights: Weights, group: Any) -> Weights:
    """The same model as another rank sees it."""
    return Weights(
        weights.storage, loader=weights.loader, process_group=group, architecture=weights.architecture
    )


@every_model
def test_experts_mean_what_each_layer_means_alone(model: Weights) -> None:
    for prefix in prefixes(model):
        made = model.get_experts(prefix)
        alone = seen_by(model, None)
        for expert in range(made.shape[0]):
            names = made.gate_up.names[expert].split(", ")
            gate_up, down = made.dequantize(expert)
            assert_same_bits(gate_up, torch.cat([alone.get_weights(name).dequantize() for name in names]))
            assert_same_bits(down, alone.get_weights(made.down.names[expert]).dequantize())
    report = model.report()
    assert [name for name in report.unused if EXPERT.fullmatch(name)] == []


@every_model
def test_experts_have_their_owners_numbers(folder: Path, model: Weights) -> None:
    checked = 0
    for name, want in load_file(folder / EXPECTED).items():
        kind, _, rest = name.partition(".")
        if kind == "dequant" and (found := EXPERT.fullmatch(rest)):
            made, expert = model.get_experts(found[1]), int(found[2])
            gate, up = made.gate_up.dequantize(expert).chunk(2)
            down = made.down.dequantize(expert)
            own = {"gate_proj": gate, "w1": gate, "up_proj": up, "w3": up, "down_proj": down, "w2": down}
            assert_rounded(own[found[3]], want)
            checked += 1
        elif kind == "dequant_last_expert":
            prefix, _, matrix = rest.rpartition(".")
            made = model.get_experts(prefix)
            stack = made.down if matrix == "down_proj" else made.gate_up
            assert_rounded(stack.dequantize(len(stack) - 1).T, want)
            checked += 1
    if not checked:
        pytest.skip("no numbers of experts were recorded")


@every_model
@pytest.mark.parametrize("world", [2, 4, 8])
def test_shares_of_experts_are_the_whole_or_every_rank_refuses_alike(model: Weights, world: int) -> None:
    for prefix in prefixes(model):
        whole = model.get_experts(prefix)
        E, H, inner = whole.shape
        cut = lawful(whole.gate_up.config, "N", inner, world, H) and lawful(
            whole.down.config, "K", inner, world, inner
        )
        parts = loaded(model, prefix, world, split="tensor")
        assert bool(parts) == cut
        if parts:
            assert_joined(parts, whole)
        parts = loaded(model, prefix, world, split="experts")
        assert bool(parts) == (world <= E)
        for part in parts:
            assert_joined([part], whole)
        assert [name for part in parts for name in part.down.names] == list(whole.down.names if parts else ())
        parts = loaded(model, prefix, world, split="both", expert_ranks=2)
        assert bool(parts) == bool(loaded(model, prefix, world // 2, split="tensor"))
        for run in (parts[: world // 2], parts[world // 2 :]) if parts else ():
            assert_joined(run, whole)


def loaded(weights: Weights, prefix: str, world: int, **how: Any) -> list[ExpertsWeight]:
    """What each rank loads; nothing where all refuse in the same words."""
    parts, words = [], set()
    for group in FakeWorld(world):
        here = seen_by(weights, group)
        try:
            parts.append(here.get_experts(prefix, **how))
        except (CutError, DivideError) as error:
            words.add(str(error))
        else:
            unused = here.report().unused
            assert [name for name in unused if name.startswith(f"{prefix}.")] == []
    assert len(words) == (not parts)
    return parts
