"""Values of bitsandbytes' codes: NF4, FP4, and the 8-bit codes of quantized scales.

Source: bitsandbytes 0.50.2, equal to its tables.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * twelfths / 12 for sign in (1, -1) for twelfths in (0, 0.0625, 8, 12, 4, 6, 2, 3)
    ),
}  # fmt: skip


def _spaced(steps: int) -> NDArray[np.float32]:
    """Numbers (steps + 1) from 0.1 to 1 at equal distances, rounded once each, as torch.linspace does."""
    low, count = np.float32(0.1), np.arange(steps + 1, dtype=np.float64)
    step = float((1 - low) / np.float32(steps))
    from_low, from_one = float(low) + step * count, 1 - step * (steps - count)
    return np.where(count < (steps + 1) // 2, from_low, from_one).astype(np.float32)


@cache
def dynamic_map() -> tuple[float, ...]:
    """Values (256) of the 8-bit codes of quantized scales, with more digits for larger powers of ten."""
    positive: list[float] = []
    for i in range(7):
        edges = _spaced(2**i)
        positive += (np.float32(10.0 ** (i - 6)) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return tuple(sorted([*positive, *(-value for value in positive), 0.0, 1.0]))
