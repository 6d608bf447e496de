"""The ends of a model: vocabularies that ranks do not divide, quantized heads, heads that are embeddings."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload.detect import loader_from_config
from qload.errors import ArgumentError, ShapeError
from qload.methods import ParallelLMHead, VocabParallelEmbedding
from qload.parallel import FakeWorld, Rank
from qload.quantize import Fp8Quantizer, QuantizingLoader
from qload.testing import assert_same_bits
from tests.methods.loaded_layers import PLAIN, bias_of, on_all_ranks, refusals, weights_of
from tests.methods.test_loaded_layers import GPTQ, count, gptq

pytestmark = pytest.mark.usefixtures("seen_texts")

EMBED = "model.embed_tokens"
IDS = torch.tensor([[0, 5, 16], [16, 11, 4]])


def embed(weights: Any) -> VocabParallelEmbedding:
    return VocabParallelEmbedding.load(weights, EMBED)


def head(weights: Any, vocab: int, **options: Any) -> ParallelLMHead:
    return ParallelLMHead.load(weights, "lm_head", vocab=vocab, **options)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_trap_65_a_vocabulary_that_the_ranks_do_not_divide(world: int) -> None:
    """17 tokens: the embedding of each, and all logits with the head's bias, on every rank."""
    tensors = {
        f"{EMBED}.weight": count(17, 4),
        "lm_head.weight": count(17, 4) + 1,
        "lm_head.bias": bias_of(17),
    }
    x = count(2, 3, 4)
    logits = x @ tensors["lm_head.weight"].T + bias_of(17)

    def both(weights: Any) -> nn.Module:
        return _Both(embed(weights), head(weights, 17))

    for got in on_all_ranks(tensors, PLAIN, world, both, lambda rank: IDS, lambda rank: x):
        assert torch.equal(got[..., :4], tensors[f"{EMBED}.weight"][IDS])
        assert torch.equal(got[..., 4:], logits)


class _Both(nn.Module):
    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return torch.cat([self.first(ids), self.last(x)], -1)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_trap_65_a_quantized_head_is_cut_in_whole_words(world: int) -> None:
    """192 rows for 5 ranks: 40, in words of 8; of these rows the last two are padding of the vocabulary."""
    tensors = gptq("lm_head", N=192) | {"lm_head.bias": bias_of(192)}
    loader = loader_from_config(GPTQ | {"lm_head": True})
    x = count(2, 128)
    whole = weights_of(tensors, loader).get_weights("lm_head").get_linear()(x) + bias_of(192)

    for got in on_all_ranks(tensors, loader, world, lambda weights: head(weights, 190), lambda rank: x):
        assert torch.equal(got, whole[:, :190])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("by_name", [True, False])
def test_trap_65_a_tied_head_is_the_embedding(world: int, by_name: bool) -> None:
    tensors = {f"{EMBED}.weight": count(17, 4), "lm_head.bias": bias_of(17)}
    x = count(2, 4)

    def tied(weights: Any) -> ParallelLMHead:
        if by_name:
            return head(weights, 17, tied_to=EMBED)
        layer = embed(weights)
        made = head(weights, 17, tied_to=layer)
        assert made.typed_linear.weight.data_ptr() == layer.weight.data_ptr()  # type: ignore[union-attr]
        return made

    for got in on_all_ranks(tensors, PLAIN, world, tied, lambda rank: x):
        assert torch.equal(got, x @ count(17, 4).T + bias_of(17))


def test_a_head_that_is_stored_is_believed_before_a_flag_that_ties_it() -> None:
    tensors = gptq("lm_head") | {f"{EMBED}.weight": count(64, 128)}
    loader = loader_from_config(GPTQ | {"lm_head": True})
    weights = weights_of(tensors, loader)

    layer = head(weights, 64, tied_to=EMBED)

    assert layer.typed_linear.typed.format == "gptq"  # type: ignore[union-attr]
    assert not any(name.startswith(EMBED) for name in weights.report().used)


@pytest.mark.parametrize("world", [1, 2])
def test_a_quantized_embedding_gives_rows_and_a_tied_head_stays_quantized(world: int) -> None:
    tensors = gptq(EMBED)
    loader = loader_from_config(GPTQ)
    whole, x = weights_of(tensors, loader).get_weights(EMBED), count(2, 128)
    rows = on_all_ranks(tensors, loader, world, embed, lambda rank: torch.arange(64))

    def tied(weights: Any) -> ParallelLMHead:
        made = head(weights, 64, tied_to=EMBED)
        assert made.typed_linear.typed.format == "gptq"  # type: ignore[union-attr]
        return made

    assert_same_bits(rows[-1], whole.dequantize())
    for got in on_all_ranks(tensors, loader, world, tied, lambda rank: x):
        assert torch.equal(got, whole.get_linear()(x))


def test_what_quantizes_while_loading_leaves_embeddings_and_tied_heads_plain() -> None:
    loader = QuantizingLoader(PLAIN, Fp8Quantizer())
    weights = weights_of({f"{EMBED}.weight": count(16, 16) / 3, "up.weight": count(16, 16)}, loader)

    layer = embed(weights)

    assert weights.get_weights("up").format == "fp8"
    assert_same_bits(layer.weight, count(16, 16) / 3)
    assert head(weights, 16, tied_to=EMBED).typed_linear.typed.format == "unquantized"  # type: ignore[union-attr]
    assert head(weights, 16, tied_to=layer).typed_linear.typed.format == "unquantized"  # type: ignore[union-attr]


def test_a_rank_that_would_have_no_rows_is_refused_on_every_rank() -> None:
    tensors = {f"{EMBED}.weight": count(5, 4), "lm_head.weight": count(5, 4)}

    for make in (embed, lambda weights: head(weights, 5)):
        assert len(refusals(tensors, PLAIN, 4, make)) == 1
    assert "none of them empty" in refusals(tensors, PLAIN, 4, embed).pop()


def test_fewer_rows_than_tokens_are_refused() -> None:
    tensors = {"lm_head.weight": count(16, 4), f"{EMBED}.weight": count(16, 4)}

    with pytest.raises(ShapeError, match=r"lm_head: .*\n.*at least 17"):
        head(weights_of(tensors, PLAIN), 17)
    del tensors["lm_head.weight"]
    with pytest.raises(ShapeError, match="at least 17"):
        head(weights_of(tensors, PLAIN), 17, tied_to=EMBED)
    with pytest.raises(ShapeError, match="at least 65"):
        head(weights_of(gptq(EMBED), loader_from_config(GPTQ)), 65, tied_to=EMBED)


def test_ranks_that_cannot_tell_each_other_are_refused() -> None:
    tensors = {"lm_head.weight": count(16, 4), f"{EMBED}.weight": count(16, 4)}

    for make in (embed, lambda weights: head(weights, 16)):
        with pytest.raises(ArgumentError, match="summed, gathered"):
            make(weights_of(tensors, PLAIN, Rank(1, 2)))
    assert "rows 8 to 16" in repr(embed_of_rank(tensors))


def embed_of_rank(tensors: dict[str, Tensor]) -> VocabParallelEmbedding:
    """The second of two ranks' embedding."""
    made: VocabParallelEmbedding = FakeWorld(2).run(lambda group: embed(weights_of(tensors, PLAIN, group)))[1]
    return made
