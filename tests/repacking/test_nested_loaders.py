"""A loader that repacks the weights of another one that repacks."""

import pytest
import torch

from qload import GPTQWeightsLoader, MemoryStorage, RepackingLoader, Weights
from qload.errors import RepackError
from qload.layouts import Stored
from qload.repacking import GPTQMarlinWeightsLoader

pytestmark = pytest.mark.usefixtures("seen_texts")


def weights_of(loader: RepackingLoader, bits: int) -> Weights:
    rows = 64 * bits // 32
    words = torch.arange(rows * 64, dtype=torch.int32).reshape(rows, 64)
    tensors = {
        "up.qweight": words,
        "up.qzeros": torch.zeros(2, 64 * bits // 32, dtype=torch.int32),
        "up.scales": torch.ones(2, 64).half(),
        "up.g_idx": torch.arange(64, dtype=torch.int32) // 32,
    }
    return Weights(MemoryStorage(tensors), loader=loader)


def test_a_refusal_of_the_inner_loader_is_raised() -> None:
    inner = GPTQMarlinWeightsLoader(GPTQWeightsLoader(bits=3, group_size=32))

    with pytest.raises(RepackError, match="got 3"):
        weights_of(RepackingLoader(inner, "exllama"), 3).get_weights("up")


def test_a_lenient_inner_loader_notes_its_refusal() -> None:
    inner = GPTQMarlinWeightsLoader(GPTQWeightsLoader(bits=3, group_size=32), strict=False)
    weights = weights_of(RepackingLoader(inner, "exllama"), 3)

    assert weights.get_weights("up").format == "exllama"
    assert any("up: stays gptq" in note for note in weights.report().notes)


def test_options_of_the_inner_loader_hold() -> None:
    inner = RepackingLoader(GPTQWeightsLoader(bits=4, group_size=32), "exllama", zeros=Stored())
    weight = weights_of(RepackingLoader(inner, "exllama"), 4).get_weights("up")

    assert weight.config.zeros == Stored()
