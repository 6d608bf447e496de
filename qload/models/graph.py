"""A decode step as a CUDA graph: captured once for a number of sequences, replayed for every token.

Capturing gives back what torch has cached of the device's memory: what is to be kept is run afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.parallel import register_capture

StepCall = Callable[..., tuple[Tensor, ...]]
WARM_RUNS = 2  # before a capture: what is made in a first call must not be made in a graph


class StepGraph:
    """A step on a CUDA device whose inputs are copied to where the graph reads them, all of the host in one.

    Parameters
    ----------
    step
        Inputs on the device -> tensors. It asks nothing of the host.
    inputs
        Tensors of one dtype on the device that the first runs may use; their cells of the cache are written.
    other
        Another graph, which never runs at the same time: they share its memory and that of its libraries.
    """

    def __init__(self, step: StepCall, inputs: Sequence[Tensor], other: "StepGraph | None" = None) -> None:
        self._memory = torch.cat([each.flatten() for each in inputs])
        parts = torch.split(self._memory, [each.numel() for each in inputs])
        self._inputs = [part.view(each.shape) for part, each in zip(parts, inputs, strict=True)]
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
            self._made = step(*self._inputs)
        self._released = False
        register_capture(self)

    def release(self) -> None:
        """Free the graph, so that NCCL can destroy its communicators; later calls raise ArgumentError."""
        self._released = True
        torch.cuda.synchronize(self._memory.device)
        self._graph.reset()

    @property
    def pool(self) -> Any:
        """The graph's memory."""
        return self._graph.pool()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The step on inputs of the same shapes -> copies of its results; the host waits for nothing.

        `inputs`: any on the device, and behind them any on the host. ArgumentError once the graph is freed.
        """
        if self._released:
            raise ArgumentError("engine", "a call within the world that it was warmed up in", "one after it")
        on_host = [each.flatten() for each in inputs if not each.is_cuda]
        if on_host:
            given = torch.cat(on_host)
            self._memory[-given.numel() :].copy_(pinned(given), non_blocking=True)
        for place, each in zip(self._inputs, inputs[: len(inputs) - len(on_host)], strict=False):
            place.copy_(each, non_blocking=True)
        self._graph.replay()
        return tuple(each.clone() for each in self._made)


def pinned(tensor: Tensor) -> Tensor:
    """A copy of a tensor of the host from which the device copies while the host goes on.

    Its memory is used again only once that is done: torch's allocator keeps an account of it.
    """
    return tensor.pin_memory()
