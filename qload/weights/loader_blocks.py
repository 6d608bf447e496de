"""Which loader serves the typed loads of `Weights`: its own, or that of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Self

from qload.loader import WeightsLoader

# The blocks of `use_loader` that are open here, the innermost last.
_BLOCKS: ContextVar[tuple[tuple["LoaderBlocks", WeightsLoader], ...]] = ContextVar("use_loader", default=())


class LoaderBlocks:
    """What `Weights` is told by who serves its typed loads: `loader` does outside of all blocks."""

    def __init__(self, loader: WeightsLoader) -> None:
        self._loader = loader

    @contextmanager
    def use_loader(self, loader: WeightsLoader) -> Iterator[Self]:
        """Within the block, `loader` serves the typed loads; nests, and survives exceptions.

        For the thread, or the task of asyncio, that opened the block, and for no other: threads that share
        these `Weights` each have blocks of their own, and those of a pool do not see their caller's.
        """
        block = (self, loader)
        _BLOCKS.set((*_BLOCKS.get(), block))
        try:
            yield self
        finally:  # of generators that hold blocks, the first to end may be the first that began
            _BLOCKS.set(tuple(open_ for open_ in _BLOCKS.get() if open_ is not block))

    @property
    def loader(self) -> WeightsLoader:
        """What serves the typed loads here: that of the innermost block of `use_loader`, or the first one."""
        inner = (loader for weights, loader in reversed(_BLOCKS.get()) if weights is self)
        return next(inner, self._loader)
