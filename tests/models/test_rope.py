"""Rotary positions against the formula in complex numbers, and each type of frequencies against its own."""

import math

import pytest
import torch
from torch import Tensor

from qload.errors import ShapeError
from qload.models import Rope, RopeConfig, rotate_halves, rotate_pairs

D, THETA = 8, 100.0
POSITIONS = torch.tensor([0, 1, 7, 300])


def exact(j: int, config: RopeConfig) -> float:
    """The frequency of pair j, in float64, as the papers have it."""
    plain = config.theta ** (-2 * j / config.dim)
    if config.type == "linear":
        return plain / config.factor
    if config.type != "llama3":
        return plain
    wave = 2 * math.pi / plain
    if wave < config.original / config.high_freq_factor:
        return plain
    if wave > config.original / config.low_freq_factor:
        return plain / config.factor
    low, high = config.low_freq_factor, config.high_freq_factor
    smooth = (config.original / wave - low) / (high - low)
    return (1 - smooth) * plain / config.factor + smooth * plain


@pytest.mark.parametrize(
    "config",
    [
        RopeConfig("default", THETA, D),
        RopeConfig("linear", THETA, D, factor=4.0),
        RopeConfig("llama3", THETA, 16, factor=8.0, original=64, low_freq_factor=1.0, high_freq_factor=4.0),
        RopeConfig("llama3", THETA, 16, factor=8.0, original=256, low_freq_factor=2.0, high_freq_factor=9.0),
    ],
    ids=lambda config: f"{config.type}-{config.original}",
)
def test_frequencies_are_those_of_the_formula(config: RopeConfig) -> None:
    want = torch.tensor([exact(j, config) for j in range(config.dim // 2)], dtype=torch.float64)

    torch.testing.assert_close(Rope(config).frequencies.double(), want, rtol=4 * 2.0**-23, atol=0)


def test_llama3_has_frequencies_of_all_three_kinds() -> None:
    config = RopeConfig("llama3", THETA, 16, factor=8.0, original=64)
    plain = torch.tensor([THETA ** (-j / 8) for j in range(8)])
    share = Rope(config).frequencies / plain

    assert (share == 1).any()
    assert (share == 1 / 8).any()
    assert ((share > 0.126) & (share < 0.999)).any()


def turned(x: Tensor, pairs: bool) -> Tensor:
    """Heads (T, heads, D) turned in complex numbers, in float64."""
    half = D // 2
    x = x.double()
    first, second = (x[..., 0::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
    frequency = torch.tensor([THETA ** (-2 * j / D) for j in range(half)], dtype=torch.float64)
    angle = POSITIONS.double()[:, None] * frequency
    both = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None]
    parts = torch.stack([both.real, both.imag], -1)
    return parts.flatten(-2) if pairs else parts.transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize("pairs", [False, True])
def test_heads_turn_as_complex_numbers_do(pairs: bool) -> None:
    x = torch.randn(4, 3, D, generator=torch.Generator().manual_seed(0))
    rope = Rope(RopeConfig("default", THETA, D, pairs))
    got = rope.turn(x, *rope(POSITIONS))

    of_angle = POSITIONS.max() * 2.0**-23  # what float32 keeps of the largest angle
    bound = (of_angle + 8 * 2.0**-23) * x.abs().max() * 2
    assert (got - turned(x, pairs)).abs().max() <= bound
    assert torch.equal(got, (rotate_pairs if pairs else rotate_halves)(x, *rope(POSITIONS)))


def test_both_ways_turn_the_same_numbers_in_another_order() -> None:
    x = torch.randn(4, 3, D, generator=torch.Generator().manual_seed(0))
    cos, sin = Rope(RopeConfig("default", THETA, D))(POSITIONS)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # out[j] = x[2 j], out[D / 2 + j] = x[2 j + 1]

    assert torch.equal(rotate_pairs(x, cos, sin)[..., order], rotate_halves(x[..., order], cos, sin))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_turned_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = Rope(RopeConfig("default", THETA, D))(POSITIONS)

    for turn in (rotate_halves, rotate_pairs):
        assert torch.equal(turn(x, cos, sin), turn(x.float(), cos, sin).to(dtype))


def test_heads_of_another_size_are_refused() -> None:
    cos, sin = Rope(RopeConfig("default", THETA, D))(POSITIONS)
    for shape in [(4, 3, 6), (3, 3, 8), (4, 8)]:
        with pytest.raises(ShapeError):
            rotate_halves(torch.zeros(shape), cos, sin)


def test_no_cast_of_the_model_rounds_a_frequency() -> None:
    rope = Rope(RopeConfig("default", 1e6, 64))
    before = rope.frequencies.clone()

    assert torch.equal(rope.half().frequencies, before)
