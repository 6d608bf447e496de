"""Vocabularies at both ends of a model, and tensors without a format."""

import pytest
import torch
from torch import Tensor

from qload.errors import DtypeError, ShapeError
from qload.models import load_model
from qload.parallel import Collectives, FakeWorld
from tests.models.drawn import config, tensors, weights
from tests.models.recorded import logits, off
from tests.models.test_loading import IDS, RANGE

pytestmark = pytest.mark.usefixtures("seen_texts")


def test_a_vocabulary_that_ranks_do_not_divide_has_a_head_of_its_own_too() -> None:
    said = config("llama", tie_word_embeddings=False, vocab_size=37)
    stored = tensors(said)
    want = logits(load_model(weights(said, stored), said), IDS)

    def work(group: Collectives) -> Tensor:
        return logits(load_model(weights(said, stored, group), said), IDS, ranks=group.size())

    assert all(off(got, want) < RANGE for got in FakeWorld(2).run(work))


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_may_be_stored_with_more_rows_than_it_has_tokens(tied: bool) -> None:
    said = config("llama", tie_word_embeddings=tied, vocab_size=37)
    stored = tensors(said)
    names = [name for name in ("model.embed_tokens.weight", "lm_head.weight") if name in stored]
    padded = {name: torch.cat([stored[name], torch.ones(3, stored[name].shape[1])]) for name in names}

    got = logits(load_model(weights(said, stored | padded), said), IDS)

    assert len(names) == 2 - tied
    assert torch.equal(got, logits(load_model(weights(said, stored), said), IDS))
    for name in names:
        short = {name: stored[name][:-1]}
        with pytest.raises(ShapeError, match=r"expected \(37 or more, \d+\), as the config says\n"):
            load_model(weights(said, stored | short), said)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.input_layernorm.weight"])
def test_a_norm_of_another_size_or_of_integers_is_refused(name: str) -> None:
    said = config("llama")
    stored = tensors(said)
    (size,) = stored[name].shape

    with pytest.raises(ShapeError) as short:
        load_model(weights(said, stored | {name: stored[name][1:]}), said)
    with pytest.raises(DtypeError) as integers:
        load_model(weights(said, stored | {name: stored[name].to(torch.int16)}), said)

    assert (short.value.tensor, short.value.expected) == (name, f"({size},), as the config says")
    assert (integers.value.tensor, integers.value.got) == (name, "int16")
    assert integers.value.expected == ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_only_a_vocabulary_may_have_more_rows_than_the_config_says(name: str) -> None:
    said = config("llama")
    stored, matrix = tensors(said), f"model.layers.0.{name}.weight"
    N, K = stored[matrix].shape
    stored[matrix] = torch.ones(N + 8, K)

    with pytest.raises(ShapeError) as caught:
        load_model(weights(said, stored), said)

    assert (caught.value.expected, caught.value.got) == (f"({N}, {K}), as the config says", (N + 8, K))
