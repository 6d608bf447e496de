"""Every model of a foreign folder: clean, or refused by name; its owner's numbers, whole and cut."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.errors import CutError, DivideError
from qload.parallel import FakeWorld
from qload.storage import open_storage
from qload.verify import inspect, verify
from qload.weights import Weights
from tests.cases.test_cases import FOLDER
from tests.format_cases import lawful

MODELS = sorted(path for path in (Path(FOLDER) / "models").iterdir()) if FOLDER else []
EXPECTED = "EXPECTED.safetensors"
LAST = "dequant_last_expert."
HALVES = (torch.float32, torch.float16, torch.bfloat16)  # one of which an owner rounds its weights to
REFUSED: dict[str, str] = {}  # methods of folders whose layers are not read

pytestmark = pytest.mark.skipif(not FOLDER, reason="QLOAD_CASES names no folder of cases")
every_model = pytest.mark.parametrize(
    "folder", [pytest.param(folder, id=folder.name) for folder in MODELS] or [pytest.param(None, id="none")]
)


def published(folder: Path, copy: Path) -> Path:
    """The folder as it is published: without the tensors that prove it."""
    copy.mkdir()
    for file in folder.iterdir():
        if file.name not in (EXPECTED, "ORIGIN.json"):
            (copy / file.name).symlink_to(file.resolve())
    return copy


def refused(folder: Path) -> str | None:
    """The name of what the folder holds, if that is none of the formats that are read."""
    config = json.loads((folder / "config.json").read_text())
    method = (config.get("quantization_config") or {}).get("quant_method")
    return REFUSED.get(method)


def stored_bytes(folder: Path) -> int:
    """Of all tensors in the files."""
    with open_storage(folder) as storage:
        return sum(storage.info(name).nbytes for name in storage.keys())  # noqa: SIM118


@every_model
def test_a_model_is_clean_and_explained_or_refused_by_name(folder: Path, tmp_path: Path) -> None:
    copy = published(folder, tmp_path / "model")
    report, name = verify(copy), refused(folder)

    if name is not None:
        assert report.verdict == "unsupported"
        assert any(name in finding.message for finding in report.findings)
    else:
        assert (inspect(copy).findings, report.findings) == ((), ())
        coverage = report.coverage
        assert coverage is not None
        assert coverage.explained == coverage.total == stored_bytes(copy)


def last_experts(config: dict[str, Any], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """(N, K) of each part of the last expert, by its prefix, from what an owner says of stacks (E, K, N)."""
    found = {}
    for name, stack in expected.items():
        if name.startswith(LAST):
            lead, _, matrix = name.removeprefix(LAST).rpartition(".")
            lead = f"{lead}.{config['num_local_experts'] - 1}"
            if matrix == "down_proj":
                found[f"{lead}.down_proj"] = stack.T
            else:
                turns = config["model_type"] == "gpt_oss"
                gate, up = (stack.T[0::2], stack.T[1::2]) if turns else stack.T.chunk(2)
                found |= {f"{lead}.gate_proj": gate, f"{lead}.up_proj": up}
    return found


@every_model
def test_layers_have_their_owners_numbers_whole_and_cut(folder: Path, tmp_path: Path) -> None:
    copy, expected = published(folder, tmp_path / "model"), load_file(folder / EXPECTED)
    wanted = {
        name.removeprefix("dequant.").removesuffix(".weight"): tensor
        for name, tensor in expected.items()
        if name.startswith("dequant.") and tensor.ndim == 2
    }
    if refused(folder) is not None:
        pytest.skip("refused by name")
    wanted |= last_experts(json.loads((folder / "config.json").read_text()), expected)
    with open_checkpoint(copy) as weights:
        for prefix, want in wanted.items():
            weight = weights.get_weights(prefix)
            assert_rounded(weight.dequantize(), want)
            for dim, world, parts in shared(weights, weight, prefix):
                axis = "NK".index(dim) - 2
                if parts is None:
                    assert not lawful(weight.config, dim, want.shape[axis], world, want.shape[-1])
                else:
                    assert lawful(weight.config, dim, want.shape[axis], world, want.shape[-1])
                    assert_rounded(torch.cat(parts, axis), want)


@every_model
def test_every_expert_of_a_plain_stack_is_a_slice_of_it_whole_and_cut(folder: Path, tmp_path: Path) -> None:
    """(E, K, N), as gpt-oss and Llama 4 are stored: what is in the file is what each expert means."""
    config = json.loads((folder / "config.json").read_text())
    stored = {
        name: each for file in folder.glob("model*.safetensors") for name, each in load_file(file).items()
    }
    stacks = {
        name: stack
        for name, stack in stored.items()
        if name.endswith(("experts.down_proj", "experts.gate_up_proj"))
        if stack.dtype in HALVES
    }
    if not stacks:
        pytest.skip("holds no plain stack")
    with open_checkpoint(published(folder, tmp_path / "model")) as weights:
        for name, stack in stacks.items():
            for expert in range(len(stack)):
                one = {f"{LAST}{name}": stack[expert].float()}
                for prefix, want in last_experts({**config, "num_local_experts": expert + 1}, one).items():
                    weight = weights.get_weights(prefix)
                    assert torch.equal(weight.dequantize(), want)
                    for dim, _, parts in shared(weights, weight, prefix):
                        assert parts is not None
                        assert torch.equal(torch.cat(parts, "NK".index(dim)), want)


def assert_rounded(got: Tensor, want: Tensor) -> None:
    """The owner's numbers, which it may have rounded once."""
    assert any(torch.equal(got.to(dtype).to(want.dtype), want) for dtype in HALVES)


def shared(weights: Weights, weight: Any, prefix: str) -> Iterator[tuple[str, int, list[Tensor] | None]]:
    """The shares of each rank, or None where all refuse in the same words; of 2 and of 4 ranks."""
    for dim, load in (("N", Weights.get_weights_col), ("K", Weights.get_weights_row)):
        for world in (2, 4):
            yield dim, world, shares(weights, load, prefix, world)


def shares(
    weights: Weights, load: Callable[[Weights, str], Any], prefix: str, world: int
) -> list[Tensor] | None:
    parts: list[Tensor] = []
    words = set()
    for rank in FakeWorld(world):
        here = Weights(weights.storage, loader=weights.loader, process_group=rank)
        try:
            parts.append(load(here, prefix).dequantize())
        except (CutError, DivideError) as error:
            words.add(str(error))
    assert bool(parts) != bool(words)
    assert len(words) < 2
    return parts or None
