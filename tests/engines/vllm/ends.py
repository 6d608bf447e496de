"""Heads and embeddings that are stored quantized, in vLLM's own classes: `nox -s vllm`."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.checkpoints import answers, changed, refused, same
from tests.models.with_transformers.stored import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM and torch import

VOCABULARY = 72  # which vLLM pads to 128: rank 1 of two has 8 rows of its own
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
SECTIONS: dict[str, dict[str, Any]] = {  # as tools say that these layers are quantized too
    "gptq": {"lm_head": True},
    "w4a16": {"ignore": []},
    "w8a8": {"ignore": []},
}
NAMES = ("gptq", "awq", "w4a16", "nf4", "fp8 block")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_quantized_head_gives_the_logits_of_what_its_codes_mean(
    name: str, world: int, tmp_path: Path
) -> None:
    head, said = {HEAD: FORMATS[name].layer}, {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    folder, want = changed("llama", name, tmp_path, head, SECTIONS.get(name), **said)

    assert same(answers(world, folder), want)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_quantized_embeddings_are_what_their_codes_mean(name: str, world: int, tmp_path: Path) -> None:
    both = {HEAD: FORMATS[name].layer, EMBEDDING: FORMATS[name].layer}
    said = {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    folder, want = changed("llama", name, tmp_path, both, SECTIONS.get(name), **said)

    assert same(answers(world, folder), want)


def test_a_model_that_has_plain_embeddings_refuses_quantized_ones_by_name(tmp_path: Path) -> None:
    embedding = {EMBEDDING: FORMATS["fp8 block"].layer}
    folder, _ = changed("mixtral", "fp8 block", tmp_path, embedding, tie_word_embeddings=False)

    assert EMBEDDING in refused(1, folder, "UnsupportedFormatError")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_head_that_is_tied_to_quantized_embeddings_is_what_they_mean(
    name: str, world: int, tmp_path: Path
) -> None:
    said = {"vocab_size": VOCABULARY, "tie_word_embeddings": True}
    folder, want = changed("llama", name, tmp_path, {EMBEDDING: FORMATS[name].layer}, **said)

    assert same(answers(world, folder), want)
