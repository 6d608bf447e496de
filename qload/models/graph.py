"""A decode step as a CUDA graph: captured once for a number of sequences, replayed for every token.

Capturing gives back what torch has cached of the device's memory: what is to be kept is run afterwards.
"""

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
    other
        Another graph, which never runs at the same time: they share its memory and that of its libraries.
    """

    def __init__(
        self, step: StepCall, tokens: Tensor, pages: Tensor, other: "StepGraph | None" = None
    ) -> None:
        self._tokens, self._pages = tokens.clone(), pages.clone()
        stream: Any = torch.cuda.Stream(tokens.device) if other is None else other.stream  # type: ignore[no-untyped-call]
        self.stream: Any = stream
        stream.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_RUNS):
                step(self._tokens, self._pages)
        torch.cuda.synchronize(tokens.device)
        self._graph = torch.cuda.CUDAGraph()
        # The watch of a process group asks after its events meanwhile, which may not break the capture.
        pool = None if other is None else other.pool
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._logits = step(self._tokens, self._pages)

    @property
    def pool(self) -> Any:
        """The graph's memory."""
        return self._graph.pool()

    def __call__(self, tokens: Tensor, pages: Tensor) -> Tensor:
        """The step on inputs of the same shapes, on the host or the device -> logits (S, vocab), a copy."""
        self._tokens.copy_(tokens, non_blocking=True)
        self._pages.copy_(pages, non_blocking=True)
        self._graph.replay()
        return self._logits.clone()
