"""One value that a cast would lose refuses the tensor, whoever asks for it."""

from typing import Any

import pytest
import torch

from qload import MemoryStorage, Weights, loader_from_config
from qload.errors import CastError
from qload.parallel import FakeWorld

pytestmark = pytest.mark.usefixtures("seen_texts")

LARGE = 70_000.0  # beyond float16


def weights(group: Any = None) -> Weights:
    held = torch.ones(8, 4)
    held[5, 3] = LARGE
    return Weights(
        MemoryStorage({"a.weight": held}),
        loader=loader_from_config(None),
        dtype=torch.float16,
        process_group=group,
    )


@pytest.mark.parametrize(
    "ask",
    [
        lambda mine: mine.get_weights("a"),
        lambda mine: list(mine.stream(["a"])),
        lambda mine: mine.get_sharded("a.weight", dim=0),
    ],
    ids=["a layer", "a stream", "a tensor"],
)
def test_one_value_among_many_is_named(ask: Any) -> None:
    with pytest.raises(
        CastError, match=r"^a\.weight: a cast from float32 to float16 overflows\n  got      70000"
    ):
        ask(weights())


def test_of_a_share_only_what_is_in_it_is_cast() -> None:
    first, second = FakeWorld(2)

    assert weights(first).get_weights_col("a").dequantize().tolist() == [[1.0] * 4] * 4
    with pytest.raises(CastError, match="70000"):
        weights(second).get_weights_col("a")
