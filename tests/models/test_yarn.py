"""Yarn by its formula, written once more in numbers of Python, and by values worked by hand."""

import math
from typing import Any

import pytest
import torch

from qload.errors import ArgumentError
from qload.models import RopeConfig
from qload.models.attention import score_scale
from qload.models.rope import yarn_attention_factor, yarn_frequencies, yarn_mscale

EPS = torch.finfo(torch.float32).eps


def yarn(dim: int = 64, theta: float = 10000.0, factor: float = 40.0, **more: Any) -> RopeConfig:
    return RopeConfig("yarn", theta, dim, factor=factor, **{"original": 4096, **more})


def by_formula(
    size: int, theta: float, factor: float, original: int, fast: float, slow: float, truncate: bool
) -> list[float]:
    """Each frequency in float64: its turns within the original positions say where on the ramp it is."""
    ends = [size * math.log(original / (2 * math.pi * turns), theta) / 2 for turns in (fast, slow)]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    low, high = max(low, 0), min(high, size - 1)
    made = []
    for pair in range(size // 2):
        divided = min(max((pair - low) / ((high - low) or 0.001), 0), 1)
        frequency = theta ** (-2 * pair / size)
        made.append(divided * frequency / factor + (1 - divided) * frequency)
    return made


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("size", "theta", "factor", "original", "fast", "slow"),
    [
        (64, 10000.0, 40.0, 4096, 32, 1),  # DeepSeek V2 and V3
        (16, 10000.0, 4.0, 128, 32, 1),
        (64, 10000.0, 40.0, 4096, 16, 2),  # other turns than the usual ones
        (64, 150000.0, 32.0, 4096, 32, 1),  # gpt-oss, which does not truncate
        (2, 10000.0, 4.0, 128, 32, 1),  # one pair
        (8, 10000.0, 8.0, 8, 1, 1),  # both ends at one pair
        (16, 100.0, 0.5, 64, 8, 2),  # a shorter context
    ],
)
def test_frequencies_are_those_of_the_formula(
    size: int, theta: float, factor: float, original: int, fast: float, slow: float, truncate: bool
) -> None:
    ends = {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
    made = yarn_frequencies(yarn(size, theta, factor, original=original, **ends))
    expected = torch.tensor(by_formula(size, theta, factor, original, fast, slow, truncate))

    # Of float32: an exponent of at most ln(theta), the power, two quotients, two products, a sum, the ramp,
    # whose own rounding counts as often as a frequency differs from the divided one.
    roundings = math.log(theta) + 8 + 2 * max(factor, 1 / factor)
    assert (made - expected).abs().le(roundings * EPS * expected).all()
    assert made.dtype == torch.float32


def test_what_turns_often_is_kept_and_what_turns_seldom_is_divided() -> None:
    plain = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    ratio = plain / yarn_frequencies(yarn())

    assert ratio[:10].sub(1).abs().max() < 64 * EPS  # floor(32 * log(4096 / 64 pi) / log(10000)) is 10
    assert ratio[23:].sub(40).abs().max() < 40 * 64 * EPS  # ceil(32 * log(4096 / 2 pi) / log(10000)) is 23
    assert ratio[10:24].diff().gt(0).all()


def test_turns_of_the_config_count() -> None:
    usual = yarn_frequencies(yarn())

    assert not usual.equal(yarn_frequencies(yarn(beta_fast=16.0)))
    assert not usual.equal(yarn_frequencies(yarn(beta_slow=4.0)))
    assert not usual.equal(yarn_frequencies(yarn(truncate=False)))


@pytest.mark.parametrize(
    ("factor", "weight", "expected"),
    [
        (40.0, 1.0, 0.1 * math.log(40.0) + 1),
        (40.0, 0.707, 0.0707 * math.log(40.0) + 1),
        (40.0, 0.0, 1.0),
        (1.0, 1.0, 1.0),
        (0.5, 1.0, 1.0),
        (0.0, 1.0, 1.0),
    ],
)
def test_the_magnitude_and_what_a_factor_of_one_or_less_makes_of_it(
    factor: float, weight: float, expected: float
) -> None:
    assert math.isclose(yarn_mscale(factor, weight), expected, rel_tol=4 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "expected"),
    [
        (1.0, 1.0, 1.0),  # DeepSeek V3
        (0.707, 0.707, 1.0),  # DeepSeek V2
        (1.0, 0.707, yarn_mscale(40.0) / yarn_mscale(40.0, 0.707)),
        (None, None, yarn_mscale(40.0)),  # gpt-oss
        (0.707, None, yarn_mscale(40.0, 0.707)),  # transformers: yarn_mscale(40.0)
        (None, 0.707, yarn_mscale(40.0) / yarn_mscale(40.0, 0.707)),  # transformers: yarn_mscale(40.0)
        (0.0, 1.0, 1 / yarn_mscale(40.0)),  # transformers: yarn_mscale(40.0)
    ],
)
def test_cosines_are_scaled_by_the_owners_formula(
    mscale: float | None, mscale_all_dim: float | None, expected: float
) -> None:
    assert yarn_attention_factor(yarn(mscale=mscale, mscale_all_dim=mscale_all_dim)) == expected


def test_an_attention_factor_of_the_config_wins() -> None:
    assert yarn_attention_factor(yarn(mscale=1.0, mscale_all_dim=0.5, attention_factor=1.25)) == 1.25


def test_the_softmax_scale() -> None:
    g = 0.1 * 0.707 * math.log(40.0) + 1

    assert score_scale(RopeConfig("default", 10000.0, 64), 64) == 0.125  # no rope_scaling
    assert score_scale(yarn(), 64) == score_scale(yarn(mscale_all_dim=0.0), 64) == 0.125
    assert math.isclose(score_scale(yarn(mscale_all_dim=0.707), 64), g * g / 8, rel_tol=1e-15)
    assert score_scale(yarn(factor=1.0, mscale_all_dim=0.707), 64) == 0.125


@pytest.mark.parametrize(
    ("named", "value"),
    [
        ("dim", 15),
        ("dim", 0),
        ("theta", 1.0),
        ("factor", 0.0),
        ("factor", math.nan),
        ("factor", math.inf),
        ("original", 0),
        ("beta_fast", 0.0),
        ("beta_slow", -1.0),
    ],
)
def test_numbers_without_a_value_are_refused(named: str, value: float) -> None:
    usual = {"dim": 16, "theta": 10000.0, "factor": 4.0, "original": 128}

    with pytest.raises(ArgumentError, match=named):
        yarn_frequencies(yarn(**{**usual, named: value}))
