"""Times on a CUDA device: graph replays over rotating buffers, so that no run lives in the cache."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

LinearCall = Callable[[], object]
ROTATE = 1 << 30  # bytes, so many times the L2 that hardly any of them is still there
REPLAYS = 15
LEAST_CALLS = 12  # of a graph
SUSTAINED = 0.06  # seconds until a chip has the clock that its power allows, and of what is timed then
TURNS = 3


def copies(bytes_each: int) -> int:
    """How many sets of buffers a rotation needs."""
    return max(2, -(-ROTATE // bytes_each))


def rounds_of(calls: int) -> int:
    """How often a graph makes so many calls, that its start does not count."""
    return -(-LEAST_CALLS // calls)


def microseconds(calls: Sequence[LinearCall], *, rounds: int = 1) -> float:
    """The median time of one call, of graph replays that make every call `rounds` times in turn."""
    return replayed([calls], rounds=rounds)[0][0]


def replayed(groups: Sequence[Sequence[LinearCall]], *, rounds: int = 1) -> list[tuple[float, Any]]:
    """The same of each group, and what its first call has left after the last replay.

    Groups are replayed in turns: as clocks fall under load, they fall for all of them.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured = [_captured(calls, rounds, stream) for calls in groups]
        times: list[list[float]] = [[] for _ in groups]
        for _ in range(REPLAYS + 2):
            for (graph, _), found in zip(captured, times, strict=True):
                found.append(_replays(graph, 1))
    counts = [len(calls) * rounds for calls in groups]
    medians = [median(found[2:]) * 1000 / count for found, count in zip(times, counts, strict=True)]
    return [(time, kept[0]) for time, (_, kept) in zip(medians, captured, strict=True)]


def sustained(groups: Sequence[Sequence[LinearCall]]) -> list[tuple[float, Any]]:
    """The same of groups that power limits: each runs alone until the clock is its own, and then is timed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured = [_captured(calls, rounds_of(len(calls)), stream) for calls in groups]
        times: list[list[float]] = [[] for _ in groups]
        for _ in range(TURNS):
            for (graph, _), found in zip(captured, times, strict=True):
                one = _replays(graph, 1)
                count = max(1, round(SUSTAINED * 1000 / one))
                _replays(graph, count)
                found.append(_replays(graph, count) / count)
    counts = [len(calls) * rounds_of(len(calls)) for calls in groups]
    medians = [median(found) * 1000 / count for found, count in zip(times, counts, strict=True)]
    return [(time, kept[0]) for time, (_, kept) in zip(medians, captured, strict=True)]


def _replays(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Milliseconds of so many, one after another."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _captured(
    calls: Sequence[LinearCall], rounds: int, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """The calls as a graph, and their results, whose memory it writes."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for _ in range(rounds) for call in calls]
    return graph, kept
