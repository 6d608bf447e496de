"""A decode step as a CUDA graph: captured once for a number of sequences, replayed for every token.

Capturing gives back what torch has cached of the device's memory: what is to be kept is run afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

StepCall = Callable[..., Tensor]
WARM_RUNS = 2  # before a capture: what is made in a first call must not be made in a graph


class StepGraph:
    """A step on a CUDA device whose inputs are copied to where the graph reads them.

    Parameters
    ----------
    step
        Inputs on the device -> logits (S, vocab). It asks nothing of the host.
    inputs
        Tensors on the device that the first runs may use; their cells of the cache are written.
    other
        Another graph, which never runs at the same time: they share its memory and that of its libraries.
    """

    def __init__(self, step: StepCall, inputs: Sequence[Tensor], other: "StepGraph | None" = None) -> None:
        self._inputs = [each.clone() for each in inputs]
        device = inputs[0].device
        stream: Any = torch.cuda.Stream(device) if other is None else other.stream  # type: ignore[no-untyped-call]
        self.stream: Any = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_RUNS):
                step(*self._inputs)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        pool = None if other is None else other.pool
        # The watch of a process group asks after its events meanwhile, which may not break the capture.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._logits = step(*self._inputs)

    @property
    def pool(self) -> Any:
        """The graph's memory."""
        return self._graph.pool()

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The step on inputs of the same shapes, on the host or the device -> logits (S, vocab), a copy."""
        for place, given in zip(self._inputs, inputs, strict=True):
            place.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._logits.clone()
