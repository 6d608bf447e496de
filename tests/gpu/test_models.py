"""Models on a GPU: graphs write what eager steps write, nothing grows once warm, two GPUs are as one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qload import native
from qload.checkpoint import open_checkpoint
from qload.models import Decoder, Engine, Sampler, load_model
from tests.bench.model import config_of, tensors_of
from tests.bench.stack import distance
from tests.models import drawn
from tests.support import torchrun

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


SIZED = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 192}
LATENT = {
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "index_topk": 64,  # more than all keys
}
UNFUSED = {"llama4_text", "glm4_moe"}  # norms after the rotation, and a rotation of some of a head's numbers


class Counted(TorchDispatchMode):
    """How often each of our operators was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.calls[name] = self.calls.get(name, 0) + name.startswith("qload::")
        return func(*args, **(kwargs or {}))


def small(kind: str, dtype: torch.dtype) -> Engine:
    """An engine of a tiny model of a type, whose heads have sizes that kernels take."""
    sizes = LATENT if "kv_lora_rank" in drawn.config(kind) else {}
    config = drawn.config(kind, **{**SIZED, **sizes, "eos_token_id": None})
    weights = drawn.weights(config, drawn.tensors(config), device="cuda", dtype=dtype)
    return Engine(load_model(weights, config), max_tokens=40, max_sequences=2, page_size=4, graphs=False)


def told(engine: Engine) -> Tensor:
    """Logits of two texts that are told token by token, and not chosen."""
    found = [engine.prefill([3, 1, 4, 1, 5], 0), engine.prefill([9], 1)]
    found += [engine.decode([n % 40, (3 * n) % 40]) for n in range(20)]
    return torch.cat(found)


@pytest.mark.parametrize("kind", drawn.OWN)
def test_kernels_are_as_close_to_float32_as_plain_torch_is(kind: str) -> None:
    """Twice as far at most: both round, in other places."""
    exact, engine = told(small(kind, torch.float32)), small(kind, torch.float16)
    with Counted() as counted:
        ours = told(engine)
    with native.reference():
        plain = told(engine)

    assert distance(ours, exact) <= 2 * distance(plain, exact)
    assert counted.calls["qload::attend_pages"] == 21 * engine.model.config.layers
    turned = sum(mask.rotary for mask in engine.model.config.masks)
    fused = kind not in UNFUSED and engine.model.config.latent is None
    assert counted.calls.get("qload::place_heads", 0) == 22 * turned * fused
    assert counted.calls["qload::add_rms_norm"] == 22 * (2 * engine.model.config.layers - 1)


def test_ids_that_a_graph_chooses_are_those_of_its_largest_logits(folder: Path) -> None:
    engine = Engine(model(folder), max_tokens=64, max_sequences=2)
    engine.warm_up(prompt_tokens=32)
    engine.prefill(PROMPTS[0])
    made = engine._decode_step([3], [0])
    engine.model.norm.weight.fill_(float("nan"))
    overflown = engine._decode_step([3], [0])

    assert made.argmax is not None
    assert made.argmax.tolist() == made.logits.argmax(-1).tolist()
    assert overflown.argmax is not None
    assert overflown.argmax.tolist() == [-1]


def ran(folder: Path, *more: str, processes: int = 1) -> list[int]:
    """The ids that the command line prints on so many GPUs."""
    prompt = ",".join(map(str, PROMPTS[0]))
    asked = ("--device", "cuda", "--prompt-ids", prompt, "--tokens", "24", *more)
    done = torchrun.ended(processes, "-m", "qload", "run", str(folder), *asked)
    assert done.returncode == 0, done.stderr
    return [int(each) for each in done.stdout.splitlines()[-1].split(",")]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sampling", [[], ["--temperature", "1", "--seed", "3"]], ids=["greedy", "drawn"])
def test_two_gpus_write_what_one_writes(folder: Path, sampling: list[str]) -> None:
    one, two = (ran(folder, *sampling, processes=count) for count in (1, 2))

    assert one == two
    assert len(one) == 24
