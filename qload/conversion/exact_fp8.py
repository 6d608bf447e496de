"""Plain weights that FP8 says to the bit: the scales with which each value is a code times a scale.

Of all scales that could say a run of values the one is looked for that puts the largest of them among the
largest codes: a scale 2**j times as large has the same codes with fewer of the small ones. The codes there
have eight significands, and rounding may have moved the scale by a few units in its last place.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from qload.formats import Fp8Config

DTYPE = torch.float8_e4m3fn
BLOCK = (128, 128)  # (outputs, inputs)
LARGEST = (256, 288, 320, 352, 384, 416, 448, 240)  # codes of each significand, the largest there are
NEAR = 2  # units in the last place
SAMPLE = 64  # values of a unit that are looked at first
RUN = 1 << 20  # values that are looked at at once
CONFIGS = (Fp8Config("tensor"), Fp8Config("channel"), Fp8Config("block", BLOCK))


@dataclass(frozen=True)
class ExactScales:
    """Scales in the shape in which compressed-tensors stores them, and what shares one."""

    config: Fp8Config
    scales: Tensor

    def codes(self, values: Tensor) -> Tensor:
        """(N, K) plain -> (N, K) in float8_e4m3fn, some outputs at a time."""
        made = torch.empty(values.shape, dtype=DTYPE)
        for start, run in _runs(values):
            made[start : start + len(run)] = (run / self._spread(start, run)).to(DTYPE)
        return made

    def _spread(self, start: int, run: Tensor) -> Tensor:
        if self.config.per == "tensor":
            return self.scales
        if self.config.per == "channel":
            return self.scales[start : start + len(run)]
        n, k = (torch.arange(size) // by for size, by in zip(run.shape, BLOCK, strict=True))
        return self.scales[n[:, None] + start // BLOCK[0], k]


def exact_scales(values: Tensor) -> ExactScales | None:
    """The fewest scales that say (N, K) values, one of all, an output or a block; None: there are none."""
    for config in CONFIGS:
        found = _scales_of(values, config)
        if found is not None:
            return ExactScales(config, found)
    return None


def _scales_of(values: Tensor, config: Fp8Config) -> Tensor | None:
    if config.per == "tensor":
        found = _one_scale(values)
        return None if found is None else found.reshape(1)
    rows = []
    for _, run in _runs(values):
        units = run if config.per == "channel" else _blocks(run)
        scales = _unit_scales(units.flatten(0, -2))
        if scales is None:
            return None
        rows.append(scales.reshape(*units.shape[:-1], *([1] if config.per == "channel" else [])))
    return torch.cat(rows)


def _runs(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Whole blocks of outputs as float32, about RUN values at a time."""
    step = max(1, RUN // max(1, values.shape[1]) // BLOCK[0]) * BLOCK[0]
    for start in range(0, len(values), step):
        yield start, values[start : start + step].float()


def _blocks(run: Tensor) -> Tensor:
    """(N, K) -> (N / 128, K / 128, values of a block), the last of each filled up with zeros."""
    n, k = BLOCK
    N, K = run.shape
    whole = functional.pad(run, (0, -K % k, 0, -N % n))
    return whole.reshape(len(whole) // n, n, -1, k).transpose(1, 2).flatten(2)


def _one_scale(values: Tensor) -> Tensor | None:
    """One for all; each that is tried is tried run by run."""
    largest = max((run.abs().max() for _, run in _runs(values)), default=torch.zeros(()))
    sample = values[:1].float()
    for scale in _tried(largest.reshape(1)):
        if not bool(_says(sample, scale).all()):
            continue
        if all(bool(_says(run.reshape(1, -1), scale)) for _, run in _runs(values)):
            return scale
    return None


def _unit_scales(units: Tensor) -> Tensor | None:
    """One for each row, or None where a row has none."""
    found = torch.zeros(len(units))
    for scales in _tried(units.abs().amax(1)):
        left = torch.nonzero(found == 0)[:, 0]
        left = left[_says(units[left, :SAMPLE], scales[left])]
        left = left[_says(units[left], scales[left])]
        found[left] = scales[left]
        if bool(found.all()):
            return found
    return None


def _tried(largest: Tensor) -> Iterator[Tensor]:
    """What may be the scales of units with these largest values; 1 of a unit of zeros."""
    for code, steps in product(LARGEST, sorted(range(-NEAR, NEAR + 1), key=abs)):
        scales = (largest / code).view(torch.int32).add(steps).view(torch.float32)
        yield torch.where(largest == 0, 1.0, scales)


def _says(units: Tensor, scales: Tensor) -> Tensor:
    """Whether each row is codes times its scale, bit by bit but for what is zero."""
    codes = (units / scales[:, None]).to(DTYPE).float()
    return (codes * scales[:, None] == units).all(1)
