"""Times on a CUDA device: graph replays over rotating buffers, so that no run lives in the cache."""

from collections.abc import Callable, Sequence
from statistics import median

import torch

ROTATE = 256 << 20  # bytes; several times the L2
REPLAYS = 15


def copies(bytes_each: int) -> int:
    """How many sets of buffers a rotation needs."""
    return max(2, -(-ROTATE // bytes_each))


def microseconds(calls: Sequence[Callable[[], object]], *, rounds: int = 1) -> float:
    """The median time of one call, of graph replays that make every call `rounds` times in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        kept = []
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                kept.append([call() for call in calls])
        times = []
        for _ in range(REPLAYS + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    del kept, graph
    return median(times[2:]) * 1000 / (len(calls) * rounds)
