"""The same weights, seen by a rank of another group."""

import pytest
import torch

from qload.architecture import architecture_of
from qload.detect import DefaultWeightsLoader, GPTQWeightsLoader
from qload.errors import ArgumentError
from qload.parallel import Rank
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.models.drawn import config

pytestmark = pytest.mark.usefixtures("seen_texts")

PLAIN, GPTQ = DefaultWeightsLoader(), GPTQWeightsLoader(bits=4, group_size=-1)
ARCHITECTURE = architecture_of(config("llama"))


@pytest.fixture
def weights() -> Weights:
    return Weights(
        MemoryStorage({"model.a.weight": torch.arange(32.0).reshape(4, 8), "b.bias": torch.ones(4)}),
        loader=PLAIN,
        dtype=torch.float16,
        process_group=Rank(0, 2),
        aliases={"bias": ["b.bias"]},
        prefix="model",
        architecture=ARCHITECTURE,
    )


def test_another_rank_has_its_own_share(weights: Weights) -> None:
    placed = Weights(weights.storage, loader=PLAIN, prefix="model")
    second = placed.of_group(Rank(1, 4))

    assert second.get_weights_col("a").dequantize().tolist() == [list(range(8, 16))]
    assert placed.get_weights_col("a").dequantize().shape == (4, 8)


def test_all_but_the_group_is_the_same(weights: Weights) -> None:
    other = weights.of_group(Rank(1, 4))

    assert (other.process_group, weights.process_group) == (Rank(1, 4), Rank(0, 2))
    assert other.storage is weights.storage
    assert other.architecture is ARCHITECTURE
    assert other.dtype == other.get_tensor("bias").dtype == torch.float16


def test_tensors_are_put_on_the_same_device() -> None:
    weights = Weights(MemoryStorage({"a.weight": torch.ones(4, 8)}), loader=PLAIN, device="meta")

    assert weights.of_group(Rank(1, 4)).get_weights_col("a").dequantize().device.type == "meta"


def test_the_loader_is_that_of_the_block(weights: Weights) -> None:
    with weights.use_loader(GPTQ):
        within = weights.of_group(Rank(0, 1))

    assert within.loader is GPTQ
    assert weights.of_group(Rank(0, 1)).loader is PLAIN


def test_exemptions_go_along_and_uses_do_not(weights: Weights) -> None:
    weights.exempt("b.*", reason="this model has no biases")
    weights.get_weights("a")
    other = weights.of_group(Rank(0, 1))

    assert (other.report().used, other.report().unused) == ([], ["model.a.weight"])
    assert other.report().exempted == {"b.bias": "this model has no biases"}
    other.get_weights("a")
    other.get_weights("a")
    other.exempt("model.*", reason="asked for elsewhere")
    assert not weights.report().twice
    assert weights.report().complete


@pytest.mark.parametrize("group", ["first", 1])
def test_what_is_no_group_is_refused(group: object, weights: Weights) -> None:
    with pytest.raises(ArgumentError, match="process_group"):
        weights.of_group(group)  # type: ignore[arg-type]
