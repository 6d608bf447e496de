"""Every sparse layer of every model of a foreign folder: stacked, cut and shared out it is its owner's."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.errors import CutError, DivideError
from qload.experts import ExpertsWeight
from qload.parallel import FakeWorld, ProcessGroup
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.cases.test_cases import FOLDER
from tests.cases.test_models import EXPECTED, MODELS, assert_rounded, published, refused
from tests.experts.expert_layers import assert_joined
from tests.format_cases import lawful

WORLDS = (2, 4, 8)
EXPERT = re.compile(r"^(.*\.experts)\.\d+\.")
STACKED = "dequant_last_expert."
PARTS = {"w1": 0, "gate_proj": 0, "w3": 1, "up_proj": 1}  # of what is fused


def is_sparse(folder: Path) -> bool:
    """Whether a model's config counts experts, and its format is read."""
    config = json.loads((folder / "config.json").read_text())
    counts = [config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")]
    return any(counts) and refused(folder) is None


SPARSE = [folder for folder in MODELS if is_sparse(folder)]

pytestmark = pytest.mark.skipif(not FOLDER, reason="QLOAD_CASES names no folder of cases")
NONE = pytest.param(None, id="none", marks=pytest.mark.skip(reason="the folder has no model with experts"))
every_sparse_model = pytest.mark.parametrize(
    "folder", [pytest.param(folder, id=folder.name) for folder in SPARSE] or [NONE]
)


def sparse_layers(weights: Weights) -> list[str]:
    """The prefixes of the experts of each layer that has some."""
    found = (EXPERT.match(name) for name in weights.storage.keys())  # noqa: SIM118
    return sorted({match[1] for match in found if match})


def shares(weights: Weights, prefix: str, world: int, **how: Any) -> list[ExpertsWeight] | str:
    """What every rank loads, or the one sentence in which all of them refuse."""
    parts, said = list[ExpertsWeight](), set[str]()
    for rank in FakeWorld(world):
        try:
            parts.append(view(weights, rank).get_experts(prefix, **how))
        except (CutError, DivideError) as error:
            said.add(str(error))
    assert (len(parts), len(said)) in ((world, 0), (0, 1))
    return parts or said.pop()


def view(weights: Weights, rank: ProcessGroup) -> Weights:
    """The same files as one rank of a world sees them."""
    return Weights(
        weights.storage, loader=weights.loader, process_group=rank, architecture=weights.architecture
    )


def may_cut(whole: ExpertsWeight, world: int) -> bool:
    """Whether outputs of gate and of up, and inputs of down, may be cut for `world` ranks."""
    _, hidden, inner = whole.shape
    gates, down = whole.gate_up.config, whole.down.config
    return lawful(gates, "N", inner, world, hidden) and lawful(down, "K", inner, world, inner)


def assert_run(parts: list[ExpertsWeight], whole: ExpertsWeight) -> None:
    """Whole experts, one run of them after another."""
    assert [n for part in parts for n in range(part.local.start, part.local.stop)] == [
        *range(len(whole.down))
    ]
    for name in ("gate_up", "down"):
        for field, tensor in getattr(whole, name).fields().items():
            assert_same_bits(torch.cat([getattr(part, name).fields()[field] for part in parts]), tensor)


def each_layer(folder: Path, copy: Path, judge: Callable[[Weights, str, ExpertsWeight], None]) -> None:
    with open_checkpoint(published(folder, copy)) as weights:
        prefixes = sparse_layers(weights)
        assert prefixes
        for prefix in prefixes:
            judge(weights, prefix, weights.get_experts(prefix))


@every_sparse_model
def test_shares_of_each_expert_are_the_whole_or_every_rank_refuses_alike(
    folder: Path, tmp_path: Path
) -> None:
    def judge(weights: Weights, prefix: str, whole: ExpertsWeight) -> None:
        for world in WORLDS:
            parts = shares(weights, prefix, world, split="tensor")
            assert isinstance(parts, str) != may_cut(whole, world), (prefix, world, parts)
            if not isinstance(parts, str):
                assert_joined(parts, whole)

    each_layer(folder, tmp_path / "model", judge)


@every_sparse_model
def test_runs_of_experts_are_the_whole_or_every_rank_refuses_alike(folder: Path, tmp_path: Path) -> None:
    def judge(weights: Weights, prefix: str, whole: ExpertsWeight) -> None:
        for world in (*WORLDS, 3):
            parts = shares(weights, prefix, world, split="experts")
            assert isinstance(parts, str) == (world > len(whole.down))
            if not isinstance(parts, str):
                assert_run(parts, whole)

    each_layer(folder, tmp_path / "model", judge)


@every_sparse_model
def test_shares_of_runs_of_experts_are_the_whole_or_every_rank_refuses_alike(
    folder: Path, tmp_path: Path
) -> None:
    def judge(weights: Weights, prefix: str, whole: ExpertsWeight) -> None:
        for world, runs in ((4, 2), (8, 2), (8, 4)):
            parts = shares(weights, prefix, world, split="both", expert_ranks=runs)
            fits = runs <= len(whole.down) and may_cut(whole, world // runs)
            assert isinstance(parts, str) != fits, (prefix, world, runs, parts)
            if not isinstance(parts, str):
                for first in range(0, world, world // runs):
                    assert_joined(parts[first : first + world // runs], whole)

    each_layer(folder, tmp_path / "model", judge)


@every_sparse_model
def test_each_expert_has_its_owners_numbers(folder: Path, tmp_path: Path) -> None:
    """Of stacks that lie (inputs, outputs) the owner's last expert, of others the experts it recorded."""
    expected, model = load_file(folder / EXPECTED), json.loads((folder / "config.json").read_text())
    turns, seen = model["model_type"] == "gpt_oss", list[str]()

    def judge(weights: Weights, prefix: str, whole: ExpertsWeight) -> None:
        own = {name: tensor for name, tensor in expected.items() if f".{prefix}." in f".{name}"}
        for name, want in own.items():
            kind, _, rest = name.partition(f"{prefix}.")
            if kind == STACKED:
                gate_up, down = whole.dequantize(len(whole.down) - 1)
                assert_rounded(down if rest == "down_proj" else laid(gate_up, turns), want.T)
            else:
                expert, part = rest.removesuffix(".weight").split(".")
                gate_up, down = whole.dequantize(int(expert))
                assert_rounded(gate_up.chunk(2)[PARTS[part]] if part in PARTS else down, want)
            seen.append(name)

    each_layer(folder, tmp_path / "model", judge)

    recorded = [name for name in expected if name.startswith("dequant") and ".experts." in name]
    assert {name for name in recorded if "bias" not in name} <= {*seen}


def laid(gate_up: Tensor, turns: bool) -> Tensor:
    """Gate's outputs and then up's, or in turns as gpt-oss stores them."""
    return torch.stack(gate_up.chunk(2), 1).flatten(0, 1) if turns else gate_up


@every_sparse_model
def test_a_run_of_experts_gives_what_the_whole_gives_of_them(folder: Path, tmp_path: Path) -> None:
    def judge(weights: Weights, prefix: str, whole: ExpertsWeight) -> None:
        E, hidden, _ = whole.shape
        x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0))
        module, one = whole.get_linear(), torch.ones(3, 1)
        for rank in FakeWorld(2):
            share = view(weights, rank).get_experts(prefix, split="experts")
            for expert in {share.local.start, share.local.stop - 1}:
                ids = torch.full((3, 1), expert)
                y = module(x, ids, one)
                assert bool(y.isfinite().all())
                assert bool(y.any())
                assert_same_bits(share.get_linear()(x, ids, one), y)
        assert module.typed.shape == (E, hidden, whole.shape[2])

    each_layer(folder, tmp_path / "model", judge)
