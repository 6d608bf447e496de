"""Models that two and four processes share by transformers' own plan, and a world that cannot.

Only `nox -s transformers` collects this file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engines.transformers.models import RANGE, Stored, greedy, logits, stored
from tests.models.recorded import off
from tests.models.with_transformers.stored import FORMATS
from tests.support import torchrun

# transformers' own plan for gpt-oss fails where the head is tied.
SHARED: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "gptq"): {"attention_bias": True},
    ("llama", "nf4"): {},
    ("qwen2", "fp8 block"): {},
    ("mixtral", "awq"): {},
    ("qwen3_moe", "nf4"): {},
    ("deepseek_v2", "gptq"): {},
    ("deepseek_v3", "fp8 block"): {},
    ("gpt_oss", "w4a16"): {"tie_word_embeddings": False},
}
AT_ONCE = 5  # how long after the start of the group a refusal may take


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models as checkpoints, each in a folder of its own."""
    made = tmp_path_factory.mktemp("models")
    for (kind, name), said in SHARED.items():
        stored(kind, name, made / f"{kind} {name}", **said)
    return made


def refused(path: Path, ranks: int) -> str:
    """The words with which every rank refuses a model, soon, before it reads a weight."""
    said = [json.loads((path / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
    assert max(each["seconds"] for each in said) < AT_ONCE
    assert not any(each["read"] for each in said)
    (words,) = {each["error"] for each in said}
    return str(words)


def test_a_world_that_cannot_cut_a_model_ends_with_the_sentence_of_all_ranks(tmp_path: Path) -> None:
    stored("llama", "awq", tmp_path / "uneven", intermediate_size=48)  # groups of 16, and shares of 24

    run = torchrun.ended(2, "-m", "tests.engines.transformers.ranks", str(tmp_path), "--stop")

    words = refused(tmp_path / "uneven", 2)
    assert run.returncode
    assert words.startswith("model.layers.0.mlp.down_proj")
    assert run.stderr.count(f"CutError: {words.splitlines()[0]}") == 2
    assert not list(tmp_path.rglob("2-*.safetensors"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_logits_of_one_and_all_the_same_bits(ranks: int, folder: Path) -> None:
    run = torchrun.ended(ranks, "-m", "tests.engines.transformers.ranks", str(folder))
    assert run.returncode == 0, run.stderr[-4000:]

    for kind, name in SHARED:
        path = folder / f"{kind} {name}"
        if ranks == FORMATS[name].refused:
            assert f"for {ranks} ranks" in refused(path, ranks)
            continue
        plain = Stored(path / "stored", path / "means").plain()
        first, *others = (load_file(path / f"{ranks}-{rank}.safetensors") for rank in range(ranks))
        assert all(torch.equal(first[key], other[key]) for other in others for key in first)
        assert off(first["logits"], logits(plain)) < RANGE
        assert torch.equal(first["tokens"], greedy(plain))
