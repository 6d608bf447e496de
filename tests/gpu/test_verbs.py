"""Every verb on every fixture model on a GPU, as users type them."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from qload.checkpoint import open_checkpoint
from qload.cli import main
from qload.models import Engine, load_model
from tests.paths import FIXTURES
from tests.support import torchrun

pytestmark = pytest.mark.gpu

MODELS = sorted(path for path in (FIXTURES / "models").iterdir() if path.is_dir())
DTYPES = ("float16", "bfloat16", "float32")
PROMPT, TOKENS = "5,17,3", 6


def output(*arguments: str) -> str:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == 0, f"{result.stderr}\n{result.exception!r}"
    return result.stdout


def ids(text: str) -> list[int]:
    return [int(each) for each in text.splitlines()[-1].split(",")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_run_generates_on_a_gpu(model: Path, dtype: str) -> None:
    found = ids(
        output("run", model, "--prompt-ids", PROMPT, "--tokens", TOKENS, "--device", "cuda", "--dtype", dtype)
    )

    assert len(found) == TOKENS


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_float32_on_a_gpu_chooses_the_ids_of_a_cpu(model: Path) -> None:
    asked = ("run", model, "--prompt-ids", PROMPT, "--tokens", TOKENS, "--dtype", "float32")

    assert ids(output(*asked, "--device", "cuda")) == ids(output(*asked))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_a_graph_and_eager_steps_choose_the_same(model: Path, dtype: str) -> None:
    """Logits of equal ids differ by roundings alone, so that ids differ where two logits are this close."""
    with open_checkpoint(model, device="cuda", dtype=getattr(torch, dtype), target="auto") as weights:
        loaded = load_model(weights)
    logits = []
    for graphs in (True, False):
        engine = Engine(loaded, max_tokens=32, max_sequences=2, graphs=graphs)
        engine.warm_up(prompt_tokens=8)
        first = [engine.prefill([5, 17, 3], 0), engine.prefill([9], 1)]
        logits.append([*first, *(engine.decode([n, 2 * n + 1]) for n in range(4))])
    for graph, eager in zip(*logits, strict=True):
        off = (graph.double() - eager.double()).abs().max()
        assert off <= 16 * torch.finfo(getattr(torch, dtype)).eps * eager.double().abs().max()


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_every_other_verb_ends_well(model: Path) -> None:
    verbs = (
        ["inspect"],
        ["verify"],
        ["verify", "--logits", "--device", "cuda"],
        ["plan", "--tp", "1"],
        ["explain"],
        ["bench-load", "--device", "cuda"],
    )
    for verb, *options in verbs:
        json.loads(output(verb, model, *options, "--json"))
    assert json.loads(output("diff", model, model, "--json"))["verdict"] == "ok"


LIVE = """
import sys
import time
from pathlib import Path
import torch
from qload.models import Engine, load_model
from qload.parallel import joined_world
from qload.checkpoint import open_checkpoint

with joined_world("cuda", timeout_s=120) as group:
    asked = dict(device="cuda", dtype=torch.float16, target="auto", process_group=group)
    with open_checkpoint(sys.argv[1], **asked) as weights:
        engine = Engine(load_model(weights), max_tokens=32)
    engine.warm_up(prompt_tokens=8)
    ids = engine.generate([5, 17, 3], 6)
    ended = time.monotonic()
seconds = time.monotonic() - ended
try:
    engine.decode([1])
    refused = "no"
except Exception as error:
    refused = type(error).__name__
Path(sys.argv[2], f"rank {group.rank()}").write_text(f"{seconds:.3f} {refused}")
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_world_ends_while_an_engine_with_graphs_is_alive(tmp_path: Path) -> None:
    (tmp_path / "live.py").write_text(LIVE)
    model = FIXTURES / "models" / "gptq_mixtral"

    run = torchrun.ended(2, str(tmp_path / "live.py"), str(model), str(tmp_path))

    assert run.returncode == 0, run.stderr
    for rank in (0, 1):
        seconds, refused = (tmp_path / f"rank {rank}").read_text().split()
        assert float(seconds) < 5
        assert refused == "ArgumentError"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_two_gpus_choose_the_ids_of_one(model: Path) -> None:
    """Or both ranks refuse the cut in the words of `plan`."""
    options = ("--prompt-ids", PROMPT, "--tokens", str(TOKENS), "--device", "cuda", "--dtype", "float32")
    asked = ("-m", "qload", "run", str(model), *options)
    one, two = (torchrun.ended(count, *asked) for count in (1, 2))
    planned = json.loads(CliRunner().invoke(main, ["plan", str(model), "--tp", "2", "--json"]).stdout)

    if not planned["worlds"]["2"]["fits"]:
        assert two.returncode != 0
        assert planned["worlds"]["2"]["reason"].splitlines()[0] in two.stderr
        return
    assert two.returncode == 0, two.stderr
    assert ids(two.stdout) == ids(one.stdout)
