"""How long kernels took on one H200, and between what was timed, how long they will take.

Microseconds of layers in strips, back to back in a graph, fp16, groups of 128, symmetric: the tables of
docs/cuda-decode.md, by the bytes of the codes. Nothing is predicted beyond them.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

CAPABILITY = (9, 0)
TOKENS = (1, 8, 16)
GROUP = 128
BASIS = "between times of one H200: strips, groups of 128, no zero points, float16 activations"

# By kernel, layout and bits: (K, N) and the time for each of TOKENS.
TIMED: Mapping[tuple[str, str, int], Sequence[tuple[tuple[int, int], tuple[float, ...]]]] = {
    ("decode", "strips", 4): (
        ((4096, 4096), (4.7, 5.2, 6.1)),
        ((4096, 6144), (5.6, 6.1, 7.1)),
        ((14336, 4096), (10.0, 10.6, 11.9)),
        ((8192, 8192), (10.2, 10.9, 12.5)),
        ((4096, 28672), (16.8, 17.4, 20.6)),
        ((28672, 8192), (29.0, 30.4, 35.1)),
        ((8192, 57344), (59.2, 61.5, 71.5)),
    ),
    ("decode", "strips", 8): (
        ((4096, 4096), (6.56, 6.75, 7.99)),
        ((4096, 6144), (8.18, 8.62, 9.50)),
        ((14336, 4096), (16.1, 16.3, 17.2)),
        ((8192, 8192), (17.2, 17.6, 19.1)),
        ((4096, 28672), (29.0, 29.5, 31.3)),
        ((28672, 8192), (57.8, 54.6, 57.9)),
        ((8192, 57344), (108.0, 108.0, 117.0)),
    ),
}


def predicted(
    kernel: str, layout: str, bits: int, capability: tuple[int, int], nbytes: int, tokens: int
) -> float | None:
    """Seconds for codes of so many bytes and so many tokens, between those that were timed; else None."""
    rows = TIMED.get((kernel, layout, bits))
    if rows is None or capability != CAPABILITY:
        return None
    sizes = [K * N * bits // 8 for (K, N), _ in rows]
    times = [between(tokens, TOKENS, row) for _, row in rows]
    known = [time for time in times if time is not None]
    found = between(nbytes, sizes, known) if len(known) == len(sizes) else None
    return None if found is None else found * 1e-6


def between(at: int, places: Sequence[int], values: Sequence[float]) -> float | None:
    """The value at a place, on the line between the two that are known beside it; None beyond the ends."""
    if not places[0] <= at <= places[-1]:
        return None
    right = bisect_left(places, at)
    if places[right] == at:
        return values[right]
    left = right - 1
    share = (at - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left])
