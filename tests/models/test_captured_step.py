"""A decode step of every fixture model in a CUDA graph, and the choice of its tokens: all on the device."""

from typing import Any

import pytest
import torch

from qload.checkpoint import open_checkpoint
from qload.models import Decoder, Engine, Sampler, load_model
from tests.models import drawn
from tests.paths import FIXTURES
from tests.support.fake_gpu import fake_capture, fake_module

MODELS = sorted(path for path in (FIXTURES / "models").iterdir() if path.is_dir())
KINDS = ("deepseek_v32", "glm4_moe")  # types without a fixture
SEQUENCES = 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_a_capture_of_a_step_reads_nothing_on_the_host(model: Any, dtype: torch.dtype) -> None:
    with open_checkpoint(model, dtype=dtype) as weights:
        assert_captured(load_model(weights))


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_of_a_drawn_model_reads_nothing_on_the_host(kind: str) -> None:
    said = drawn.config(kind)
    assert_captured(load_model(drawn.weights(said, drawn.tensors(said), dtype=torch.bfloat16), said))


def assert_captured(loaded: Decoder) -> None:
    """Run a step of a model as a graph is captured, and check its outputs."""
    with fake_capture():
        engine = Engine(fake_module(loaded), max_tokens=32, max_sequences=SEQUENCES)
        ids = torch.empty(SEQUENCES, dtype=torch.int64, device="cuda")
        places = torch.empty(2, SEQUENCES, dtype=torch.int64, device="cuda")
        pages = torch.empty(SEQUENCES, engine.width, dtype=torch.int64, device="cuda")
        logits, likeliest = engine._run_and_choose(ids, places, pages)

    assert tuple(logits.shape) == (SEQUENCES, loaded.config.vocab)
    assert (tuple(likeliest.shape), logits.device.type) == ((SEQUENCES,), "cuda")


@pytest.mark.parametrize(
    "sampler", [Sampler(), Sampler(temperature=0.7), Sampler(temperature=0.7, top_p=0.9)]
)
def test_tokens_are_chosen_on_the_device(sampler: Sampler) -> None:
    with fake_capture():
        logits = torch.empty(SEQUENCES, 50, device="cuda")
        drawn = torch.empty(SEQUENCES, dtype=torch.float64, device="cuda")
        chosen = sampler.choose(logits, drawn)

    assert tuple(chosen.shape) == (SEQUENCES,)
