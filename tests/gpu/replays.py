"""A chain of calls in a graph has the bits that it has outside of one, whatever was in its results before."""

from collections.abc import Callable

import torch
from torch import Tensor

from qload.testing import assert_same_bits


def assert_replays(chain: Callable[[], Tensor]) -> None:
    """Twenty replays, each over results of NaN."""
    __tracebackhide__ = True
    want = chain()
    assert bool(want.isfinite().all())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = chain()
    for _ in range(20):
        got.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(got, want)
