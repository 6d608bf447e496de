"""Times on a CUDA device: graph replays over rotating buffers, so that no run lives in the cache."""

from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import Any

import torch

LinearCall = Callable[[], object]
ROTATE = 1 << 30  # bytes, so many times the L2 that hardly any of them is still there
REPLAYS = 15
LEAST_CALLS = 12  # of a graph
SUSTAINED = 0.06  # seconds until a chip has the clock that its power allows, and of what is timed then
TURNS = 5


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

    Groups are replayed in turns, whose order changes: as clocks fall under load, they fall for all of them.
    """
    return _in_turns(groups, lambda _: rounds, _once, REPLAYS, warm=2)


def sustained(groups: Sequence[Sequence[LinearCall]]) -> list[tuple[float, Any]]:
    """The same of groups that power limits: each runs alone until the clock is its own, and then is timed."""
    return _in_turns(groups, rounds_of, _after_its_own_clock, TURNS)


def _in_turns(
    groups: Sequence[Sequence[LinearCall]],
    rounds: Callable[[int], int],
    timed: Callable[[torch.cuda.CUDAGraph], float],
    turns: int,
    warm: int = 0,
) -> list[tuple[float, Any]]:
    """Microseconds of a call of each group, by the median of turns after `warm` ones, and what it left."""
    counts = [rounds(len(calls)) for calls in groups]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured = [_captured(calls, count, stream) for calls, count in zip(groups, counts, strict=True)]
        times: list[list[float]] = [[] for _ in groups]
        order, mixed = [*zip(captured, times, strict=True)], Random(0)
        for _ in range(warm + turns):
            mixed.shuffle(order)  # none always follows the same one, which has left the chip its clock
            for (graph, _), found in order:
                found.append(timed(graph))
    of_call = [
        median(found[warm:]) * 1000 / (len(calls) * count)
        for found, calls, count in zip(times, groups, counts, strict=True)
    ]
    return [(time, kept[0]) for time, (_, kept) in zip(of_call, captured, strict=True)]


def _once(graph: torch.cuda.CUDAGraph) -> float:
    return _replays(graph, 1)


def _after_its_own_clock(graph: torch.cuda.CUDAGraph) -> float:
    count = max(1, round(SUSTAINED * 1000 / _once(graph)))
    _replays(graph, count)
    return _replays(graph, count) / count


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
