"""`qload run` of models with experts on a CPU: no matrix of an expert is left to torch."""

import json

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from qload import native
from qload.cli import main
from tests.models.recorded import off
from tests.native.test_experts import nothing_dequantized
from tests.paths import FIXTURES

RANGE = 1e-5  # of the logits: sums of float32 in another order
MODELS = ("gptq_mixtral", "auto_round_qwen3_moe", "w4a16_deepseek_v2_lite", "mxfp4_gpt_oss")


def written(name: str) -> tuple[Tensor, str]:
    """The logits after a prompt, and the ids that follow."""
    place, asked = str(FIXTURES / "models" / name), ["--prompt-ids", "3,1,4,1,5", "--tokens", "3", "--logits"]
    made = CliRunner().invoke(main, ["run", place, *asked, "--dtype", "float32"], catch_exceptions=False)
    logits, ids = made.stdout.splitlines()
    return torch.tensor(json.loads(logits)), ids


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_experts_writes_what_its_reference_does(name: str) -> None:
    with nothing_dequantized():
        logits, ids = written(name)
    with native.reference():
        want, wanted_ids = written(name)

    assert off(logits, want) < RANGE
    assert ids == wanted_ids
