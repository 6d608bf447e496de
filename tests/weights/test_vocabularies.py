"""Vocabularies that the ranks do not divide: shares of whole blocks, of which the last is short."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.detect import DefaultWeightsLoader, GPTQWeightsLoader, loader_from_config
from qload.errors import CutError, DivideError
from qload.loader import FormatLoader
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import DrawnLayer, assert_same_bits, layers
from qload.weights import Weights
from tests.example_counts import at_most
from tests.format_cases import CONFIGS, every_format
from tests.kernels.mp_layers import Case


def shares(tensors: dict[str, torch.Tensor], loader: FormatLoader, world: int) -> list[Weight]:
    return [
        Weights(MemoryStorage(tensors), loader=loader, process_group=rank).get_partial_weights_col("lm_head")
        for rank in FakeWorld(world)
    ]


def test_a_plain_vocabulary_is_shared_as_its_tensor_is() -> None:
    tensors = {"lm_head.weight": torch.arange(51.0).reshape(17, 3)}

    found = shares(tensors, DefaultWeightsLoader(), 4)

    assert [share.shape for share in found] == [(5, 3), (5, 3), (5, 3), (2, 3)]
    for rank, share in zip(FakeWorld(4), found, strict=True):
        weights = Weights(MemoryStorage(tensors), loader=DefaultWeightsLoader(), process_group=rank)
        assert_same_bits(share.dequantize(), weights.get_partial_sharded("lm_head.weight", 0))


@pytest.mark.parametrize("target", [None, "marlin", "exllama"])
def test_a_quantized_head_is_shared_in_whole_words(target: str | None) -> None:
    """192 outputs for 5 ranks are 38.4 each, and 40 in words of 8."""
    case = Case(bits=4, group=32, K=128, N=192)
    tensors = {f"lm_head.{name}": tensor for name, tensor in case.weight().fields().items()}
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "checkpoint_format": "gptq_v2",
        "lm_head": True,
    }
    whole = Weights(MemoryStorage(tensors), loader=loader_from_config(config)).get_weights("lm_head")
    loader = loader_from_config(config) if target is None else loader_from_config(config, target="exllama")

    found = [
        Weights(MemoryStorage(tensors), loader=loader, process_group=rank).get_partial_weights_col("lm_head")
        for rank in FakeWorld(5)
    ]

    assert [share.shape[0] for share in found] == [40, 40, 40, 40, 32]
    assert_same_bits(torch.cat([share.dequantize() for share in found]), whole.dequantize())


@pytest.mark.usefixtures("seen_texts")
def test_a_rank_that_would_have_nothing_is_an_error_on_every_rank() -> None:
    tensors = {f"lm_head.{name}": tensor for name, tensor in Case(K=128, N=64).weight().fields().items()}
    texts = set()
    for rank in FakeWorld(7):
        loader = GPTQWeightsLoader(bits=4, group_size=32)
        weights = Weights(MemoryStorage(tensors), loader=loader, process_group=rank)
        with pytest.raises(DivideError, match="7 shares of whole blocks of 8, none of them empty") as caught:
            weights.get_partial_weights_col("lm_head")
        texts.add(str(caught.value))
        assert not weights.report().used

    assert len(texts) == 1
    assert "world sizes 2, 3, 4, 8" in texts.pop()


@pytest.mark.usefixtures("seen_texts")
def test_an_even_cut_that_fails_says_how_a_vocabulary_is_shared() -> None:
    for name, told in (("lm_head", True), ("model.embed_tokens", True), ("model.up_proj", False)):
        weights = Weights(
            MemoryStorage({f"{name}.weight": torch.ones(17, 3)}),
            loader=DefaultWeightsLoader(),
            process_group=next(iter(FakeWorld(2))),
        )
        with pytest.raises(DivideError) as caught:
            weights.get_weights_col(name)
        assert ("remedy   get_partial_weights_col" in str(caught.value)) == told


@every_format
@given(data=st.data(), world=st.sampled_from([2, 3]))
@at_most(10)
def test_what_the_ranks_load_is_the_whole_in_every_format(
    weight_type: type[Weight], data: st.DataObject, world: int
) -> None:
    stored: DrawnLayer = data.draw(layers(weight_type, CONFIGS[weight_type]))

    def load(rank: object, name: str) -> Weight:
        weights = Weights(stored.storage(), loader=stored.loader(), process_group=rank)  # type: ignore[arg-type]
        loaded: Weight = getattr(weights, name)("layer")
        return loaded

    try:
        found = [load(rank, "get_partial_weights_col") for rank in FakeWorld(world)]
    except (CutError, DivideError):  # no cut is valid, or a rank would have nothing
        return
    whole = load(None, "get_weights")
    assert_same_bits(torch.cat([share.dequantize() for share in found], -2), whole.dequantize())
