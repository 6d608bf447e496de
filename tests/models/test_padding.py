"""Heads padded to what a backend takes, and that no result sees it."""

import pytest
import torch

from qload.errors import ArgumentError, ShapeError
from qload.models.kv_cache import HeadSizes, pad_heads, unpad_heads

pytestmark = pytest.mark.usefixtures("seen_texts")


@pytest.mark.parametrize(
    ("sizes", "key", "value"),
    [
        (HeadSizes(), 192, 128),
        (HeadSizes(equal=True), 192, 192),
        (HeadSizes(equal=True, only=(64, 128, 256)), 256, 256),
        (HeadSizes(only=(64, 128, 192, 256)), 192, 128),
        (HeadSizes(only=(256, 64, 128)), 256, 128),
        (HeadSizes(multiple=80), 240, 160),
        (HeadSizes(multiple=64, largest=192), 192, 128),
    ],
)
def test_the_smallest_sizes_that_a_backend_takes(sizes: HeadSizes, key: int, value: int) -> None:
    assert sizes.padded(192, 128) == (key, value)


def test_values_wider_than_keys_count_too() -> None:
    assert HeadSizes(equal=True).padded(16, 32) == (32, 32)


@pytest.mark.parametrize(
    "sizes", [HeadSizes(only=(64, 128)), HeadSizes(largest=191), HeadSizes(multiple=128, largest=255)]
)
def test_heads_that_no_kernel_takes_are_refused(sizes: HeadSizes) -> None:
    with pytest.raises(ArgumentError, match="192"):
        sizes.padded(192, 128)


@pytest.mark.parametrize("wrong", [{"only": ()}, {"only": (0, 64)}, {"multiple": 0}, {"largest": 0}])
def test_sizes_of_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        HeadSizes(**wrong)  # type: ignore[arg-type]


def test_padding_and_back_keeps_every_bit() -> None:
    heads = torch.randn(3, 2, 5)

    assert unpad_heads(pad_heads(heads, 8), 5).equal(heads)
    assert pad_heads(heads, 8)[..., 5:].eq(0).all()
    assert pad_heads(heads, 5) is heads


def test_sizes_that_are_too_small_are_refused() -> None:
    with pytest.raises(ShapeError):
        pad_heads(torch.ones(2, 5), 4)
    with pytest.raises(ShapeError):
        unpad_heads(torch.ones(2, 5), 6)


def test_trap_61_padded_heads_attend_as_they_would_without() -> None:
    """In whole numbers, whose sums are exact: scores and outputs are the same bits."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-4, 5, (2, 7, size), generator=draw).double() for size in (24, 24, 16))
    wide_q, wide_k, wide_v = (pad_heads(each, 32) for each in (q, k, v))

    scores = q @ k.mT
    assert (wide_q @ wide_k.mT).equal(scores)
    weights = scores.softmax(-1).mul(1 << 20).round()
    assert unpad_heads(weights @ wide_v, 16).equal(weights @ v)
