"""Codes and scales of layers that are alike go from their file to where they belong, and nowhere between.

A layer is first made without them. Where one before it has shown what layers of its kind become, they are
moved straight from the file; else the layer is loaded again with them, as if nothing had been tried. Whoever
loads many layers has threads, which move what a layer needs before it is this layer's turn.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qload import devices
from qload.kernel_formats import repack_cache
from qload.loader import LoadPlan, Rectangle, TensorSource
from qload.loader.finite_scales import is_finite, refuses_nonfinite
from qload.loader.source import (
    AskedMove,
    FileElements,
    FileMover,
    MovesUnderway,
    WrappedSource,
    in_file,
)
from qload.spec import Role, Weight

CODES = "qweight"
LEAST = 1 << 20  # bytes of codes that are worth it


class WithoutLate(WrappedSource):
    """A source of a layer without some tensors, which enters it into the ledger when the layer was made."""

    def __init__(self, inner: TensorSource, late: Iterable[str]) -> None:
        super().__init__(inner)
        self._late = frozenset(late)
        self._taken, self._noted = list[str](), list[str]()

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """As the inner source; of what is late a shape, on the CPU, where it goes."""
        if _field(name) not in self._late:
            return self.inner.read(name, index, role=role)
        info = self.inner.info(name)
        return torch.zeros((), dtype=info.dtype, device="cpu").expand(info.shape)[index]

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
class LateTensor:
    """One tensor of a layer: what a load would have read of it, and where that lies."""

    place: Rectangle
    elements: FileElements

    def begun(self, move: repack_cache.Move) -> "_Begun":
        """New memory for what it becomes, of who loads: that of other threads is not used again as well."""
        target = torch.empty(move.shape, dtype=self.elements.dtype, device="cpu")
        return _Begun(self.elements, move, devices.in_large_pages(target))


@dataclass(frozen=True)
class _Begun:
    """A tensor that is moved to memory of its own."""

    elements: FileElements
    move: repack_cache.Move
    target: Tensor

    @property
    def asked(self) -> AskedMove:
        """The move, for others."""
        return self.elements, self.target, self.move.bits, self.move.digits

    def made(self) -> Tensor | None:
        """What it has become; None where it could not be moved."""
        return self.target if self.elements.move(self.target, self.move.bits, self.move.digits) else None


class LateTensors:
    """What a layer is made without, by the names of fields, and what it is expected to become."""

    def __init__(self, owner: "ExpectedLayers", kind: Any, tensors: Mapping[str, LateTensor]) -> None:
        self.owner, self.kind, self.tensors = owner, kind, tensors
        self._begun: dict[str, _Begun] = {}  # as tensors of another layer of their kind were moved
        self._ahead: MovesUnderway | None = None
        self._failed: str | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""
        return sum(each.elements.nbytes for each in self.tensors.values())

    def is_read(self, read: Rectangle) -> bool:
        """Whether a load reads this as ever."""
        return all(read != each.place for each in self.tensors.values())

    def begin(self, mover: FileMover) -> None:
        """Begin to move them as those of another layer of their kind were, where there was one."""
        moves = None if self._begun else self.owner.moves(self.kind)
        if moves is not None:
            self._begun = {name: each.begun(moves[name]) for name, each in self.tensors.items()}
            self._ahead = mover.begin([each.asked for each in self._begun.values()])

    def make(
        self, source: TensorSource, inner: LoadPlan, known: repack_cache.RepackCache, layout: str
    ) -> Weight | None:
        """The layer in a layout; None where it has to be loaded with all of its tensors."""
        light = WithoutLate(source, self.tensors)
        weight = inner.finish(light)
        made = known.repack(weight, layout, {name: partial(self._moved, name) for name in self.tensors})
        if made is not None and refuses_nonfinite(source) and not _has_finite_scales(made):
            made = None  # a load of all tensors names the one that is refused
        if made is None:
            self.owner.give_up(self.kind, self._failed)
            self._there()  # after which nobody writes to their memory
        else:
            light.enter()
        return made

    def _moved(self, name: str, _: Tensor, move: repack_cache.Move) -> Tensor | None:
        if name in self._there() and self._begun[name].move == move:
            return self._begun[name].target
        moved = self.tensors[name].begun(move).made()
        if moved is None:
            self._failed = name
        return moved

    def _there(self) -> frozenset[str]:
        """What other threads have moved, once they are through with it."""
        made = [] if self._ahead is None else self._ahead.made
        return frozenset(name for name, done in zip(self._begun, made, strict=False) if done)


class ExpectedLayers:
    """What headers have led to expect: the first layer that looks so is loaded whole, and the others late."""

    def __init__(self) -> None:
        self._late: dict[Any, tuple[str, ...]] = {}  # of a kind the fields that its layers are made without
        self._moves: dict[Any, Mapping[str, repack_cache.Move]] = {}

    def late(self, weights: TensorSource, reads: Sequence[Rectangle]) -> LateTensors | None:
        """What of a load need not be read ahead; None where all of it is to be read as ever."""
        places = {_field(read.name): read for read in reads}
        codes = in_file(weights, *places[CODES]) if len(places) == len(reads) and CODES in places else None
        if codes is None or not LEAST <= codes.nbytes <= repack_cache.MAX_CODE_BYTES:
            return None
        kind = _kind(weights, reads)
        if kind not in self._late:
            if len(self._late) < repack_cache.MAX_KINDS:
                self._late[kind] = repack_cache.MOVED_TENSORS
            return None
        late = {CODES: LateTensor(places[CODES], codes)} if self._late[kind] else {}
        for name in self._late[kind][1:]:
            elements = in_file(weights, *places[name]) if name in places else None
            if elements is not None:
                late[name] = LateTensor(places[name], elements)
        return LateTensors(self, kind, late) if late else None

    def shown(
        self, weights: TensorSource, reads: Sequence[Rectangle], moves: Mapping[str, repack_cache.Move] | None
    ) -> None:
        """A layer was loaded whole, and tensors of those like it move so; None: they do not."""
        kind = _kind(weights, reads) if moves is not None else None
        if moves is not None and kind in self._late:
            self._moves[kind] = moves

    def give_up(self, kind: Any, failed: str | None) -> None:
        """Layers of a kind are not made so; where a tensor beside the codes has failed, with that one."""
        late = self._late[kind] if failed not in (None, CODES) else ()
        self._late[kind] = tuple(name for name in late if name != failed)

    def moves(self, kind: Any) -> Mapping[str, repack_cache.Move] | None:
        """How the tensors of the next layer of a kind are expected to move; None where nothing is."""
        return self._moves.get(kind) if self._late[kind] else None


def _has_finite_scales(weight: Weight) -> bool:
    fields = weight.fields()
    scales = (spec for spec in type(weight).tensors(weight.config) if spec.role is Role.SCALE)
    return all(is_finite(fields[spec.name], spec) for spec in scales if spec.name in fields)


def _field(name: str) -> str:
    return name.rpartition(".")[2]


def _kind(weights: TensorSource, reads: Sequence[Rectangle]) -> Any:
    """What headers say of the tensors of a layer, beside its name."""
    infos = ((_field(read.name), weights.info(read.name)) for read in reads)
    return tuple((name, info.dtype, info.shape) for name, info in infos)
