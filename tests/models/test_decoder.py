"""Layers whose sums are left to the next norm: what they add up to, beside the formula written out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload.experts import GatedActivation
from qload.models import Block, Decoder
from qload.models.feed_forward import GatedFeedForward
from qload.models.norm import Norm

pytestmark = pytest.mark.usefixtures("seen_texts")

T, H = 3, 16


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Times(nn.Module):
    """x times a matrix, whatever else it is given."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.matrix = drawn(H, H, seed=seed)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x @ self.matrix


class Kept:
    """A step that keeps nothing."""

    def begun(self) -> "Kept":
        return self


def normed(x: Tensor, norm: Norm) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_norm_of_a_sum_is_the_sum_and_its_norm(dtype: torch.dtype) -> None:
    x, added = drawn(T, H, seed=1).to(dtype), drawn(T, H, seed=2).to(dtype)
    norm = Norm((1 + drawn(H) / 4).to(dtype), 1e-3)
    total, y = norm.of_sum(x, added)

    assert torch.equal(total, x + added)
    assert torch.equal(y, norm(x + added))
    if dtype == torch.float64:
        torch.testing.assert_close(y, normed(x + added, norm))


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_layers_add_what_attention_and_feed_forward_make_of_norms(layers: int) -> None:
    parts = [(Times(4 * n), Times(4 * n + 1)) for n in range(layers)]
    norms = [
        tuple(Norm(1 + drawn(H, seed=n + 50 * side) / 4, 1e-3) for side in (1, 2)) for n in range(layers)
    ]
    blocks = [Block(*pair, two) for pair, two in zip(parts, norms, strict=True)]  # type: ignore[arg-type]
    model = Decoder(None, nn.Identity(), blocks, Norm(drawn(H), 1e-3), nn.Identity())  # type: ignore[arg-type]
    x = want = drawn(T, H, seed=99)
    for (attention, feed_forward), (first, second) in zip(parts, norms, strict=True):
        want = want + normed(want, first) @ attention.matrix
        want = want + normed(want, second) @ feed_forward.matrix

    got = model.hidden(x, Kept(), None)  # type: ignore[arg-type]

    torch.testing.assert_close(got, want)


def test_the_gate_is_the_first_half_and_the_second_is_multiplied() -> None:
    layer = GatedFeedForward(nn.Identity(), nn.Identity(), GatedActivation("silu"))
    both = drawn(T, 2 * H)

    want = both[:, :H] * torch.sigmoid(both[:, :H]) * both[:, H:]

    torch.testing.assert_close(layer(both), want)
