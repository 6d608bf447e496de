"""Models on a GPU: graphs write what eager steps write, nothing grows once warm, two GPUs are as one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qload.models import Decoder, Engine, Sampler, load_model
from qload.weights import open_checkpoint
from tests.bench.model import config_of, tensors_of
from tests.paths import ROOT

pytestmark = pytest.mark.gpu

SHAPE = {"hidden": 512, "inner": 1024, "heads": 8, "kv_heads": 2, "vocab": 1000}
BLOCKS = 2
PROMPTS = [[5, 17, 900, 3, 44], [8], [*range(100, 130)]]
DRAWN = Sampler(temperature=1.0, top_p=0.9, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A GPTQ checkpoint of a small Llama."""
    torch.manual_seed(0)
    made: Path = tmp_path_factory.mktemp("model")
    save_file(tensors_of(BLOCKS, **SHAPE), made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(config_of(BLOCKS, **SHAPE)))
    return made


def model(folder: Path) -> Decoder:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.float16, "target": "auto"}
    with open_checkpoint(folder, **options) as weights:
        return load_model(weights)


def written(engine: Engine, sampler: Sampler) -> list[dict[int, int]]:
    return list(engine.stream(PROMPTS, 20, sampler))


@pytest.mark.parametrize("sampler", [Sampler(), DRAWN], ids=["greedy", "drawn"])
def test_a_graph_writes_what_eager_steps_write(folder: Path, sampler: Sampler) -> None:
    """With a page for all tokens, so that an eager step sees as many masked keys as the graph does."""
    made = model(folder)
    engines = [
        Engine(made, max_tokens=64, max_sequences=3, page_size=64, graphs=each) for each in (True, False)
    ]
    for engine in engines:
        engine.warm_up(prompt_tokens=32)
    graph, eager = (written(engine, sampler) for engine in engines)

    assert graph == eager
    assert len(graph) == 20


def test_sequences_of_a_graph_that_others_leave_go_on_as_before(folder: Path) -> None:
    made = model(folder)
    engine = Engine(made, max_tokens=64, max_sequences=3)
    engine.warm_up(prompt_tokens=32)
    for place, prompt in enumerate(PROMPTS):
        engine.prefill(prompt, place)
    both = engine.decode([1, 2], [2, 0])
    alone = Engine(made, max_tokens=64)
    alone.prefill(PROMPTS[2])

    assert both.shape == (2, SHAPE["vocab"])
    assert both[0].argmax() == alone.decode([1])[0].argmax()


def test_after_the_warm_up_no_memory_is_taken(folder: Path) -> None:
    engine = Engine(model(folder), max_tokens=256, max_sequences=3)
    engine.warm_up(prompt_tokens=200)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    names = ("reserved_bytes.all.current", "segment.all.current", "num_device_alloc")
    before = torch.cuda.memory_stats()

    for length in (200, 1, 2, 77, 150):
        for _ in engine.stream([[1] * length] * 3, 40, DRAWN):
            pass

    after = torch.cuda.memory_stats()
    assert {name: after.get(name) for name in names} == {name: before.get(name) for name in names}
    assert after["allocated_bytes.all.current"] <= before["allocated_bytes.all.current"]


def ran(folder: Path, *more: str, processes: int = 1) -> list[int]:
    """The ids that the command line prints on so many GPUs."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    prompt = ",".join(map(str, PROMPTS[0]))
    command = [sys.executable, *launch, "-m", "qload", "run", str(folder), "--device", "cuda"]
    done = subprocess.run(
        [*command, "--prompt-ids", prompt, "--tokens", "24", *more],
        capture_output=True, check=False, text=True, cwd=ROOT, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [int(each) for each in done.stdout.splitlines()[-1].split(",")]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sampling", [[], ["--temperature", "1", "--seed", "3"]], ids=["greedy", "drawn"])
def test_two_gpus_write_what_one_writes(folder: Path, sampling: list[str]) -> None:
    one, two = (ran(folder, *sampling, processes=count) for count in (1, 2))

    assert one == two
    assert len(one) == 24
