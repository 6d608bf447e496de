"""Scratch space: the neediest layer's, per device, kept when asked again, asked for before the first call."""

import pytest
import torch
from torch import nn

from qload.errors import ArgumentError, NotWarmError
from qload.kernels import ExllamaLinearKernel, warm_up
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.usefixtures("seen_texts")

CPU = torch.device("cpu")


class Prepared(nn.Module):
    def __init__(self, N: int, K: int) -> None:
        super().__init__()
        self.K, case = K, Case(N=N, K=K)
        self.held = case.layer(case.weight())
        self.kernel = ExllamaLinearKernel(case.config, "qweight", "scales")
        self.kernel.process_weights_after_loading(self.held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel.apply_weights(self.held, x)

    @property
    def buffer(self) -> torch.Tensor:
        return self.held.exllama_scratch[CPU].buffer


def size(N: int, K: int, tokens: int) -> int:
    return sum(-(-part // 128) * 128 for part in (2 * N * K, 4 * N * tokens))


def test_the_neediest_layer_of_a_device_decides_and_all_share() -> None:
    model = nn.ModuleList([Prepared(64, 256), Prepared(32, 768), Prepared(32, 64)])

    assert warm_up(model, 10) == {CPU: max(size(64, 256, 10), size(32, 768, 10))}
    assert len({layer.buffer.data_ptr() for layer in model}) == 1


def test_it_grows_with_longer_inputs_and_more_layers_and_never_shrinks() -> None:
    small, large = Prepared(32, 64), Prepared(64, 256)
    model = nn.ModuleList([small])
    warm_up(model, 7)
    warm_up(model, 3)
    assert small.buffer.numel() == size(32, 64, 7)
    model.append(large)

    warm_up(model, 5)

    assert large.buffer.numel() == size(64, 256, 7)
    assert large.buffer.numel() >= 2 * 64 * 256
    large(torch.ones(7, 256).half())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_which_layer_comes_last_decides_nothing(order: tuple[int, ...]) -> None:
    layers = [Prepared(32, 64), Prepared(64, 256), Prepared(32, 128)]
    model = nn.ModuleList([layers[place] for place in order])

    assert warm_up(model, 4) == {CPU: size(64, 256, 4)}
    assert [tuple(layer(torch.ones(4, layer.K).half()).shape) for layer in layers] == [
        (4, 32),
        (4, 64),
        (4, 32),
    ]


def test_a_shorter_length_later_takes_nothing_away() -> None:
    layer = Prepared(64, 256)
    warm_up(layer, 7)
    before = layer(torch.ones(7, 256).half())

    warm_up(layer, 2)

    assert torch.equal(layer(torch.ones(7, 256).half()), before)


def test_a_model_without_such_layers_needs_none() -> None:
    assert warm_up(nn.Linear(4, 4), 16) == {}


def test_a_layer_that_is_called_before_refuses() -> None:
    with pytest.raises(NotWarmError, match=r"no scratch space on cpu\n  remedy   call qload\.warm_up"):
        Prepared(64, 256)(torch.ones(1, 256).half())


def test_an_input_longer_than_said_is_refused() -> None:
    layer = Prepared(64, 256)
    warm_up(layer, 4)
    layer(torch.ones(2, 2, 256).half())

    with pytest.raises(ArgumentError, match="at most 4 tokens, as warm_up was told\n  got      5"):
        layer(torch.ones(5, 256).half())


def test_no_token_at_all_is_no_length() -> None:
    with pytest.raises(ArgumentError, match="at least 1 token"):
        warm_up(nn.Linear(4, 4), 0)


def test_layers_keep_their_words_as_they_are_called() -> None:
    """Kernels that shuffle in place, or write past the weight, would show here."""
    first, second = Prepared(64, 256), Prepared(64, 256)
    warm_up(nn.ModuleList([first, second]), 4)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).half()
    before = {name: tensor.clone() for name, tensor in first.held.named_parameters()}

    one = first(x)
    second(x * 2)

    assert torch.equal(first(x), one)
    assert all(torch.equal(tensor, before[name]) for name, tensor in first.held.named_parameters())
