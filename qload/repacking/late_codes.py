"""Codes of layers that are alike go from their file to where they belong, without another place between.

A layer is first made without its codes. Where one before it has shown what layers of its kind become, its
codes are moved straight from the file; else it is loaded again with them, as if nothing had been tried. Who
loads many layers has threads, of which one moves the codes of a layer before it is this layer's turn.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qload import devices
from qload.kernel_formats import alike
from qload.loader import LoadPlan, Rectangle, TensorSource
from qload.loader.source import FileElements, Threads, in_file
from qload.native.settings import one_thread
from qload.repacking.header_only import HeaderOnlySource
from qload.spec import Role, Weight

CODES = "qweight"
LEAST = 1 << 20  # bytes of codes that are worth it


class WithoutCodes(HeaderOnlySource):
    """A source of a layer without its codes, which enters it into the ledger when the layer was made."""

    def __init__(self, inner: TensorSource) -> None:
        super().__init__(inner, CODES)
        self._taken, self._noted = list[str](), list[str]()

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """As the inner source; of the codes a shape, on the CPU, where they go."""
        if name.rpartition(".")[2] != CODES:
            return self.inner.read(name, index, role=role)
        info = self.inner.info(name)
        return torch.zeros((), dtype=info.dtype).expand(info.shape)[index]

    def take(self, names: Iterable[str]) -> None:
        """Names that were used, kept until `enter`."""
        self._taken += names

    def note(self, text: str) -> None:
        """A note, kept until `enter`."""
        self._noted.append(text)

    def enter(self) -> None:
        """Hand the notes and names that were kept to the inner source: the layer was made."""
        for text in self._noted:
            self.inner.note(text)
        self.inner.take(self._taken)


@dataclass(frozen=True)
class _Begun:
    """Codes that a thread moves as those of the last layer of their kind were."""

    move: alike.Move
    target: Tensor
    done: "Future[bool]"


class LateCodes:
    """The codes of one layer, and what they are expected by."""

    def __init__(self, owner: "ExpectedLayers", kind: Any, place: Rectangle, elements: FileElements) -> None:
        self.owner, self.kind, self.place, self.elements = owner, kind, place, elements
        self._begun: _Begun | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""
        return self.elements.nbytes

    def begin(self, threads: Threads) -> None:
        """Begin to move them as those of the last layer of their kind were, where there was one."""
        move = self.owner.move(self.kind) if self._begun is None else None
        if move is not None:
            target = devices.in_large_pages(torch.empty(move.shape, dtype=self.elements.dtype))
            done = threads(partial(_alone, self.elements, target, move))
            self._begun = _Begun(move, target, done)

    def make(
        self, source: TensorSource, inner: LoadPlan, known: alike.AlikeLayers, layout: str
    ) -> Weight | None:
        """The layer in a layout; None where it has to be loaded with its codes."""
        light = WithoutCodes(source)
        weight = inner.finish(light)
        with nullcontext() if self._begun is None else one_thread():  # other threads move codes meanwhile
            made = known.repack(weight, layout, self._moved)
        if made is None:
            self.owner.give_up(self.kind)
        else:
            light.enter()
        return made

    def _moved(self, like: Tensor, move: alike.Move) -> Tensor | None:
        begun, self._begun = self._begun, None
        if begun is not None and begun.done.result() and begun.move == move:
            return begun.target
        target = devices.writable(like, move.shape, like.dtype, None)
        if not self.elements.move(target, move.bits, move.digits):
            return None
        self.owner.learn(self.kind, move)
        return target


def _alone(elements: FileElements, target: Tensor, move: alike.Move) -> bool:
    """On this thread, as other threads move other codes."""
    with one_thread():
        return elements.move(target, move.bits, move.digits)


class ExpectedLayers:
    """What headers have led to expect: the first layer that looks so is loaded whole, and the others late."""

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}
        self._moves: dict[Any, alike.Move] = {}

    def late(self, weights: TensorSource, reads: Sequence[Rectangle]) -> LateCodes | None:
        """The codes of a load that need not be read ahead; None where all of it is to be read as ever."""
        places = [read for read in reads if read.name.rpartition(".")[2] == CODES]
        elements = in_file(weights, *places[0]) if len(places) == 1 else None
        if elements is None or not LEAST <= elements.nbytes <= alike.LARGE:
            return None
        kind = tuple(_seen(weights, read) for read in reads)
        if kind not in self._known:
            if len(self._known) < alike.MOST:
                self._known[kind] = True
            return None
        return LateCodes(self, kind, places[0], elements) if self._known[kind] else None

    def give_up(self, kind: Any) -> None:
        """Layers of a kind are not made so."""
        self._known[kind] = False

    def learn(self, kind: Any, move: alike.Move) -> None:
        """The codes of a layer of a kind were moved so."""
        self._moves[kind] = move

    def move(self, kind: Any) -> alike.Move | None:
        """How the codes of the next layer of a kind are expected to move; None where nothing is."""
        return self._moves.get(kind) if self._known[kind] else None


def _seen(weights: TensorSource, read: Rectangle) -> Any:
    """What a header says of a tensor, beside the name of its layer."""
    info = weights.info(read.name)
    return read.name.rpartition(".")[2], info.dtype, info.shape
