"""Where a layer's time jumps or falls as tokens are added, of measured rows.

A caller who pads to more tokens should never gain by it, and one token more should cost little.
"""

from collections.abc import Iterator
from typing import Any

MORE = 1.03  # times as long as some larger number of tokens: it should have been padded
JUMP = 1.25  # times as long as one token fewer


def found(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A sentence for each, layer by layer."""
    layers: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        if row["us"]:
            layer = tuple(row[name] for name in ("layout", "bits", "group", "K", "N"))
            layers.setdefault(layer, {})[row["M"]] = row["us"]
    for (layout, bits, _, K, N), times in layers.items():
        for M, time in sorted(times.items()):
            where = f"{layout}, {bits} bits, {K} x {N}, M = {M}: {time:.1f} us"
            if M - 1 in times and time > JUMP * times[M - 1]:
                yield f"{where}, {time / times[M - 1]:.2f} times M = {M - 1}"
            later = min((other, more) for more, other in times.items() if more >= M)
            if time > MORE * later[0]:
                yield f"{where}, {time / later[0]:.2f} times M = {later[1]}"
