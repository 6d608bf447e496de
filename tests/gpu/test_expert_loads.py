"""Experts loaded to a device by native threads: bits of a load on the host, and no wait for each expert."""

import warnings
from pathlib import Path

import pytest
import torch

from qload import ExpertsWeight, open_checkpoint
from qload.testing import assert_same_bits
from tests.bench.expert_formats import FORMATS
from tests.bench.expert_loads import FACTS, LAYER, STACKS, write_experts, write_stacks

pytestmark = pytest.mark.gpu
HIDDEN, INNER = 512, 1024
formats = pytest.mark.parametrize("name", [*FORMATS, STACKS])


def write(folder: Path, name: str, experts: int) -> Path:
    """A checkpoint with more bytes than one thread reads alone."""
    if name == STACKS:
        write_stacks(folder / name, experts, HIDDEN, INNER)
    else:
        write_experts(folder / name, FORMATS[name], experts, HIDDEN, INNER)
    return folder / name


def load(folder: Path, device: str, repacked: bool) -> ExpertsWeight:
    with open_checkpoint(folder, target="auto" if repacked else None, device=device) as weights:
        return weights.get_experts(f"{LAYER}.experts", facts=FACTS)


@formats
@pytest.mark.parametrize("repacked", [False, True])
def test_bits_are_those_of_a_load_on_the_host(name: str, repacked: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, name, 12)

    made, want = load(folder, "cuda", repacked), load(folder, "cpu", False)

    if repacked:
        assert "strips" in made.gate_up.format
        want = want.repack("strips")
    assert made.fields().keys() == want.fields().keys()
    for field, tensor in want.fields().items():
        assert_same_bits(made.fields()[field].cpu(), tensor)


@formats
def test_the_host_does_not_wait_for_each_expert(name: str, tmp_path: Path) -> None:
    counts = []
    for experts in (6, 12):
        folder = write(tmp_path / str(experts), name, experts)
        load(folder, "cuda", True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            load(folder, "cuda", True)
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing" in str(each.message) for each in caught))
    assert counts[1] <= counts[0]
