"""Heads of attention among ranks: whole ones, or an error that every rank words alike."""

import pytest
import torch

from qload.detect import DefaultWeightsLoader, GPTQWeightsLoader
from qload.errors import ArgumentError, CutError, DivideError
from qload.loader import WeightsLoader
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.kernels.mp_layers import Case

PLAIN = DefaultWeightsLoader()


def refused(
    tensors: dict[str, torch.Tensor], loader: WeightsLoader, heads: tuple[int, int], world: int
) -> tuple[type[Exception], str]:
    """The one error of all ranks."""
    found = set()
    for rank in FakeWorld(world):
        weights = Weights(MemoryStorage(tensors), loader=loader, process_group=rank)
        with pytest.raises((CutError, DivideError)) as caught:
            weights.get_weights_col_packed_qkv("a", *heads)
        found.add((type(caught.value), str(caught.value)))
        assert not weights.report().used
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("heads", "world", "what", "lawful"),
    [
        pytest.param((6, 6), 4, "query heads = 6", "2, 3, 6", id="queries"),
        pytest.param((12, 3), 4, "key/value heads = 3", "3, 6, 12", id="fewer keys than ranks"),
        pytest.param((12, 6), 4, "key/value heads = 6", "2, 3, 6, 12", id="more keys than ranks"),
        pytest.param((7, 7), 2, "query heads = 7", "7", id="a prime"),
    ],
)
def test_heads_that_no_ranks_can_share_are_refused(
    heads: tuple[int, int], world: int, what: str, lawful: str
) -> None:
    tensors = {"a.weight": torch.zeros((heads[0] + 2 * heads[1]) * 4, 2)}

    assert refused(tensors, PLAIN, heads, world) == (
        DivideError,
        f"a: {what} does not divide into {world} ranks\n  lawful   world sizes {lawful}",
    )


def test_the_worlds_that_an_error_offers_are_lawful() -> None:
    tensors = {"a.weight": torch.arange(18.0 * 4)[:, None].repeat(1, 2)}

    for world in (3, 6, 12):
        for rank in FakeWorld(world):
            weights = Weights(MemoryStorage(tensors), loader=PLAIN, process_group=rank)
            rows = weights.get_weights_col_packed_qkv("a", 12, 3).dequantize()[:, 0]
            q, k, v = rows.split([48 // world, 4, 4])
            key = rank.rank() * 3 // world
            assert q[0] == rank.rank() * (48 // world)
            assert k.tolist() == [48 + 4 * key + i for i in range(4)]
            assert v.tolist() == [60 + 4 * key + i for i in range(4)]


def test_one_key_head_is_on_every_rank() -> None:
    tensors = {"a.weight": torch.arange(10.0)[:, None].repeat(1, 2)}

    for rank in FakeWorld(4):
        weights = Weights(MemoryStorage(tensors), loader=PLAIN, process_group=rank)
        rows = weights.get_weights_col_packed_qkv("a", 8, 1).dequantize()[:, 0]
        assert rows.tolist() == [2 * rank.rank(), 2 * rank.rank() + 1, 8, 9]


def test_a_head_that_ends_inside_a_word_is_refused() -> None:
    weight = Case(N=96, K=32).weight()  # 24 heads of four outputs, in words of eight
    loader = GPTQWeightsLoader(bits=4, group_size=32, zeros=weight.config.zeros)
    tensors = {f"a.{name}": tensor for name, tensor in weight.fields().items()}

    kind, text = refused(tensors, loader, (20, 2), 4)

    assert kind is CutError
    assert "cannot cut N = 96 at 20 for 4 ranks" in text


@pytest.mark.parametrize("heads", [(0, 1), (8, 0), (8.0, 1), (True, 1)], ids=repr)
def test_what_is_no_count_of_heads_is_refused(heads: tuple[int, int]) -> None:
    weights = Weights(MemoryStorage({"a.weight": torch.zeros(24, 2)}), loader=PLAIN)

    with pytest.raises(ArgumentError, match=r"whole numbers, at least 1|num_heads\n  expected int"):
        weights.get_weights_col_packed_qkv("a", *heads)
