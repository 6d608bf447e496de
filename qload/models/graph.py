"""A decode step as a CUDA graph: captured once for a number of sequences, replayed for every token."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

StepCall = Callable[[Tensor, Tensor], Tensor]
WARM_RUNS = 2  # before a capture: what is made in a first call must not be made in a graph


class StepGraph:
    """A step on a CUDA device whose inputs are copied to where the graph reads them.

    Parameters
    ----------
    step
        tokens (3, S) and pages (S, P), int64 -> logits (S, vocab). It asks nothing of the host.
    tokens, pages
        Inputs on the device that the first runs may use; their cells of the cache are written.
    pool
        The memory of another graph that never runs at the same time, or None.
    """

    def __init__(self, step: StepCall, tokens: Tensor, pages: Tensor, pool: Any = None) -> None:
        self._tokens, self._pages = tokens.clone(), pages.clone()
        stream: Any = torch.cuda.Stream(tokens.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_RUNS):
                step(self._tokens, self._pages)
        torch.cuda.synchronize(tokens.device)
        self._graph = torch.cuda.CUDAGraph()
        # The watch of a process group asks after its events meanwhile, which may not break the capture.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._logits = step(self._tokens, self._pages)

    @property
    def pool(self) -> Any:
        """The graph's memory, for further graphs."""
        return self._graph.pool()

    def __call__(self, tokens: Tensor, pages: Tensor) -> Tensor:
        """The step on inputs of the same shapes, on the host or the device -> logits (S, vocab), a copy."""
        self._tokens.copy_(tokens, non_blocking=True)
        self._pages.copy_(pages, non_blocking=True)
        self._graph.replay()
        return self._logits.clone()
