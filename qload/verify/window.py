"""A layer that is looked at in runs of outputs, read from its file in pieces that lie together.

Where outputs are the last axis of what is stored, a run of a few is a few bytes of each row, and a call for
each. A window reads wider ones at once, and hands out runs of them from memory.
"""

from dataclasses import dataclass

from torch import Tensor

from qload.loader.source import TensorSource, WrappedSource
from qload.spec import Role
from qload.storage import TensorInfo

WINDOW = 1 << 23  # bytes of a tensor that are held at most, where no more were asked for


@dataclass(frozen=True)
class Window:
    """What is held of a tensor: along an axis from `start` to `stop`."""

    axis: int
    start: int
    stop: int
    held: Tensor

    def part(self, axis: int, wanted: slice) -> Tensor | None:
        """A copy of what is wanted along this axis; None where not all of it is here."""
        if axis != self.axis or not self.start <= wanted.start <= wanted.stop <= self.stop:
            return None
        if (self.start, self.stop) == (wanted.start, wanted.stop):
            return self.held
        return self.held.narrow(axis, wanted.start - self.start, wanted.stop - wanted.start).contiguous()


class WindowSource(WrappedSource):
    """What an inner source holds; of tensors that are cut along a later axis, a window is kept.

    One thread reads it, and changes nothing of what it is given.
    """

    def __init__(self, inner: TensorSource) -> None:
        super().__init__(inner)
        self._windows: dict[str, Window] = {}

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """As the inner source, which reads no more than WINDOW bytes beyond what is asked for."""
        info = self.inner.info(name)
        cut = [
            axis
            for axis, (part, size) in enumerate(zip(index, info.shape, strict=False))
            if part.indices(size)[:2] != (0, size)
        ]
        if len(cut) != 1 or not cut[0] or not info.nbytes:
            return self.inner.read(name, index, role=role)
        (axis,) = cut
        window = self._windows.get(name)
        found = None if window is None else window.part(axis, index[axis])
        if found is None:
            self._windows.pop(name, None)  # before there is another
            window = self._windows[name] = self._ahead(name, info, axis, index, role)
            found = window.part(axis, index[axis])
        assert found is not None
        return found

    def _ahead(self, name: str, info: TensorInfo, axis: int, index: tuple[slice, ...], role: Role) -> Window:
        """From what is asked for on, as much as may be held."""
        size, start = info.shape[axis], index[axis].start
        stop = min(size, max(index[axis].stop, start + WINDOW * size // info.nbytes))
        wide = (*index[:axis], slice(start, stop), *index[axis + 1 :])
        return Window(axis, start, stop, self.inner.read(name, wide, role=role))
