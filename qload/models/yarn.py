"""Yarn: rotary frequencies for more positions than a model was trained on, and the scales that go with them.

Source: `modeling_deepseek.py` of DeepSeek-V2 and V3, after "YaRN: Efficient Context Window Extension of Large
Language Models" (arXiv 2309.00071). transformers 5.23.0 computes the same frequencies. Its `magnitude` is
another where a config gives only one of `mscale` and `mscale_all_dim`: there the owner's formula is kept,
which takes 1 and 0 for what is missing.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError, checked

APART = 0.001  # what the owner puts between two ends of a ramp that are one


@checked
def yarn_frequencies(
    size: int,
    theta: float,
    factor: float,
    original: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """Radians a position, of each pair of a head's `size` rotated elements: (size / 2,), float32.

    Pairs that turn more than `beta_fast` times within the `original` positions keep their frequency, those
    that turn less than `beta_slow` times have it divided by `factor`, and a ramp lies between. ArgumentError
    for a number that the formula has no value for.

    Parameters
    ----------
    size
        How many elements of a head are rotated; even.
    theta
        The base of the frequencies: `rope_theta`.
    factor
        How many times longer the context is.
    original
        `original_max_position_embeddings`: the positions of the first training.
    beta_fast, beta_slow
        Turns within `original` positions, at the two ends of the ramp.
    truncate
        Whether the ends of the ramp are rounded to whole pairs, outwards.
    device
        Where the result is made; None: torch's default.
    """
    _refuse(size < 2 or size % 2, "size", "an even number above 0", size)
    for name, number in (("factor", factor), ("beta_fast", beta_fast), ("beta_slow", beta_slow)):
        _refuse(not 0 < number < math.inf, name, "a number above 0", number)
    _refuse(not 1 < theta < math.inf, "theta", "a number above 1", theta)
    _refuse(original < 1, "original", "1 or more positions", original)

    powers = theta ** (torch.arange(0, size, 2, device=device).float() / size)
    low, high = (_pair(turns, size, theta, original) for turns in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    pairs = torch.arange(size // 2, device=device, dtype=torch.float32)
    ramp = ((pairs - low) / (high - low if high != low else APART)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def magnitude(factor: float, weight: float = 1.0) -> float:
    """What attention grows by at a `factor` times longer context: 0.1 * `weight` * ln(`factor`) + 1.

    1.0 for a `factor` of 1 or less. `weight`: `mscale` or `mscale_all_dim` of a config.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_magnitude(
    factor: float,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
) -> float:
    """What cosines and sines are multiplied by, or the `attention_factor` that a config gives.

    The `magnitude` of `factor` and `mscale` (None: 1) by that of `factor` and `mscale_all_dim` (None: 0).
    """
    if attention_factor is not None:
        return attention_factor
    above = magnitude(factor, 1.0 if mscale is None else mscale)
    return above / magnitude(factor, 0.0 if mscale_all_dim is None else mscale_all_dim)


def softmax_scale(head_size: int, factor: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What scores of queries and keys are multiplied by in DeepSeek V2 and V3.

    1 / sqrt(`head_size`), of the sum of both parts of a head, not of a padded one; times the square of the
    `magnitude` of yarn's `factor` and `mscale_all_dim`. None: no yarn, or a config that has no such key.
    """
    grown = 1.0 if factor is None else magnitude(factor, mscale_all_dim or 0.0)
    return math.pow(head_size, -0.5) * grown * grown


def _pair(turns: float, size: int, theta: float, original: int) -> float:
    """Which pair, counted with a fraction, turns so often within the original positions."""
    return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _refuse(wrong: Any, name: str, expected: str, got: object) -> None:
    if wrong:
        raise ArgumentError(name, expected, str(got))
