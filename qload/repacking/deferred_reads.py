"""Deferred reads: codes and scales of equal layers are moved from their file straight to the repacked weight.

A layer is first loaded without these tensors. If an earlier layer of its kind has shown the moves, the
tensors are moved from the file; else the layer is loaded again with all tensors. In a stream, threads make
the moves before the layer's turn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qload import devices
from qload.kernel_formats import repack_cache
from qload.kernel_formats.repack_cache import Move, RepackCache
from qload.loader import LoadPlan, Rectangle, TensorSource, WrappedSource
from qload.loader.layer_values import is_finite
from qload.loader.source import FileElements, Index
from qload.spec import Role, Weight
from qload.weights.prefetch import FileMoveRequest, NativeJob, NativeReader

CODES = "qweight"
MIN_CODE_BYTES = 1 << 20  # smaller layers gain nothing


@dataclass(frozen=True)
class DeferredTensor:
    """A tensor of a layer: the slices of its load, and their range of the file."""

    slices: Rectangle
    elements: FileElements

    def begin(self, move: Move) -> "TensorMove":
        """Allocate the target of a move, on this thread: memory of other threads would not be reused."""
        target = torch.empty(move.shape, dtype=self.elements.dtype, device="cpu")
        return TensorMove(self.elements, move, devices.in_large_pages(target))


@dataclass(frozen=True)
class TensorMove:
    """Move of a tensor from its file to new memory."""

    elements: FileElements
    move: Move
    target: Tensor

    @property
    def request(self) -> FileMoveRequest:
        """The move, for native threads."""
        return FileMoveRequest(self.elements.place, self.target, self.move.bits, self.move.digits)

    def run(self) -> Tensor | None:
        """Move the tensor on this thread; None after a failure."""
        return self.target if self.elements.move(self.target, self.move.bits, self.move.digits) else None


class DeferredTensors:
    """Deferred tensors of a layer by field, as part of a `LoadPlan`."""

    def __init__(
        self, kinds: "DeferredKinds", kind: Any, layout: str, tensors: Mapping[str, DeferredTensor]
    ) -> None:
        self.kinds, self.kind, self.layout, self.tensors = kinds, kind, layout, tensors
        self._moves: dict[str, TensorMove] = {}  # begun, as predicted
        self._job: NativeJob | None = None
        self._failed: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(each.elements.nbytes for each in self.tensors.values())

    def is_read(self, rectangle: Rectangle) -> bool:
        """Return True for slices that the load reads as usual."""
        return all(rectangle != each.slices for each in self.tensors.values())

    def begin(self, reader: NativeReader) -> None:
        """Begin the moves of an earlier layer of the kind, if there was one."""
        moves = None if self._moves else self.kinds.moves(self.kind)
        if moves is not None:
            self._moves = {name: each.begin(moves[name]) for name, each in self.tensors.items()}
            self._job = reader.begin([each.request for each in self._moves.values()])

    def load(self, source: TensorSource, read: Callable[[TensorSource], Weight]) -> Weight | None:
        """Load the repacked layer; None: it has to be read with all tensors."""

        def placeholder(name: str, index: Index, role: Role) -> Tensor | None:
            if _field(name) not in self.tensors:
                return None
            info = source.info(name)
            return torch.zeros((), dtype=info.dtype, device="cpu").expand(info.shape)[index]

        light = WrappedSource(source, placeholder, ledger="later")
        weight = read(light)
        moves = {name: partial(self._move, name) for name in self.tensors}
        repacked = self.kinds.cache.repack(weight, self.layout, moves)
        if repacked is not None and source.nonfinite == "error" and not _has_finite_scales(repacked):
            repacked = None  # the load of all tensors names the wrong one
        if repacked is None:
            self.kinds.drop(self.kind, self._failed)
            self._find_moved()  # wait: no thread writes to the targets any more
        else:
            light.commit()
        return repacked

    def _move(self, name: str, _: Tensor, move: Move) -> Tensor | None:
        if name in self._find_moved() and self._moves[name].move == move:
            return self._moves[name].target
        moved = self.tensors[name].begin(move).run()
        if moved is None:
            self._failed = name
        return moved

    def _find_moved(self) -> frozenset[str]:
        """Fields of the tensors that native threads have moved, after the end of all moves."""
        moved = [] if self._job is None else self._job.moved
        return frozenset(name for name, done in zip(self._moves, moved, strict=False) if done)


class DeferredKinds:
    """Kinds of layers by headers: the first of a kind is read whole, the next ones with deferred tensors.

    `cache`: recipes of the repacked layers.
    """

    def __init__(self, cache: RepackCache) -> None:
        self.cache = cache
        self._fields: dict[Any, tuple[str, ...]] = {}  # deferred fields of a kind
        self._moves: dict[Any, Mapping[str, Move]] = {}

    def find_kind(self, weights: TensorSource, prefix: str, plan: LoadPlan) -> Any:
        """Kind of the layer `prefix`, by the headers of its reads; None without deferred tensors."""
        codes = weights.headers(prefix, (CODES,)).get(CODES)
        if codes is None or not MIN_CODE_BYTES <= codes.nbytes <= repack_cache.MAX_CODE_BYTES:
            return None
        rectangles = {_field(rectangle.name): rectangle for rectangle in plan.reads}
        if len(rectangles) != len(plan.reads) or CODES not in rectangles:
            return None
        infos = {field: weights.info(rectangle.name) for field, rectangle in rectangles.items()}
        return tuple((field, info.stored_dtype, info.shape) for field, info in infos.items())

    def plan(
        self, weights: TensorSource, reads: Sequence[Rectangle], kind: Any, layout: str
    ) -> DeferredTensors | None:
        """Defer tensors of a load; None for the first layer of a kind, and without deferred fields."""
        rectangles = {_field(rectangle.name): rectangle for rectangle in reads}
        codes = weights.file_elements(*rectangles[CODES])
        if codes is None:
            return None
        if kind not in self._fields:
            if len(self._fields) < repack_cache.MAX_KINDS:
                self._fields[kind] = repack_cache.MOVED_TENSORS
            return None
        tensors = {CODES: DeferredTensor(rectangles[CODES], codes)} if self._fields[kind] else {}
        for field in self._fields[kind][1:]:
            elements = weights.file_elements(*rectangles[field]) if field in rectangles else None
            if elements is not None:
                tensors[field] = DeferredTensor(rectangles[field], elements)
        return DeferredTensors(self, kind, layout, tensors) if tensors else None

    def record(self, kind: Any, moves: Mapping[str, Move] | None) -> None:
        """Record the moves of a layer that was read whole; None: moves alone cannot repack it."""
        if moves is not None and kind in self._fields:
            self._moves[kind] = moves

    def drop(self, kind: Any, failed: str | None) -> None:
        """Stop deferring a kind; after a failure of another field than the codes, that field alone."""
        fields = self._fields[kind] if failed not in (None, CODES) else ()
        self._fields[kind] = tuple(name for name in fields if name != failed)

    def moves(self, kind: Any) -> Mapping[str, Move] | None:
        """Predicted moves of the next layer of a kind; None without a prediction."""
        return self._moves.get(kind) if self._fields[kind] else None


def _has_finite_scales(weight: Weight) -> bool:
    fields = weight.fields()
    scales = (spec for spec in type(weight).tensors(weight.config) if spec.role is Role.SCALE)
    return all(is_finite(fields[spec.name], spec) for spec in scales if spec.name in fields)


def _field(name: str) -> str:
    return name.rpartition(".")[2]
