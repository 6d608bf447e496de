"""Many loads, one after another: while one is repacked, what the next ones need is read."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from qload.devices import stream_on
from qload.errors import QloadError, check_type, checked
from qload.loader import LoadPlan, Part, TensorSource, WeightsLoader
from qload.loader.finite_scales import Nonfinite
from qload.loader.source import LateElements
from qload.native.modules import one_thread
from qload.spec import Role, Weight
from qload.storage import FillingStorage, WeightStorage
from qload.weights.ahead import Ahead, ReaderAhead
from qload.weights.casts import by_role
from qload.weights.in_file import ElementsInFile, in_file
from qload.weights.loads import Load, LoadHolder, parts_of

WINDOW = 128 << 20  # bytes that are read ahead at most, but for those of one load
MOST = 64  # loads that are planned ahead
FACTS, SMALL = 16, 1 << 20  # tensors of so many bytes that are kept, as the next layers may have the same

L = TypeVar("L", bound="str | Load")


class StreamOwner(LoadHolder, TensorSource, Protocol):
    """What `Weights` is here."""

    storage: WeightStorage
    device: torch.device
    dtype: torch.dtype | None
    nonfinite: Nonfinite

    def _stored(self, name: str) -> str: ...

    def read_fact(self, name: str) -> Tensor:
        """A small tensor that decides, on the CPU."""

    def place(self, fact: Tensor) -> Tensor:
        """A part of it, where tensors are put."""


class StreamedLoads:
    """What `Weights` is asked for many layers by, and what spares a wait for its device."""

    @checked
    def stream(self, loads: Iterable[L]) -> Iterator[tuple[L, Weight]]:
        """Each load with its weight, in order: as if the typed loads were asked one by one, and faster.

        Threads read what the next loads need, some 128 MiB ahead, while one is checked and repacked; onto a
        CUDA device through pinned memory, on streams of their own. An error is that of the typed load, raised
        when it is that load's turn. Close the iterator, or use it up: until then threads wait for it.

        Parameters
        ----------
        loads
            Prefixes, each of a whole layer as `get_weights` loads it, or `Load`s. `load_layers` does this for
            all layers of a checkpoint.
        """
        owner: Any = self
        return _stream(owner, owner.loader, iter(loads))

    def read_fact(self: StreamOwner, name: str) -> Tensor:
        """All of the tensor `name`, which decides how others are read, on the CPU."""
        return self.storage.read(self._stored(name))

    def in_file(self: StreamOwner, name: str, index: tuple[slice, ...]) -> ElementsInFile | None:
        """Elements `index` of the tensor `name` in their file; None where they are no one range of it."""
        return in_file(self.storage, self._stored(name), index, self.device)

    def place(self: StreamOwner, fact: Tensor) -> Tensor:
        """A part of a `fact` on the device, in memory of its own."""
        return fact.clone() if self.device.type == "cpu" else fact.to(self.device, non_blocking=True)


@dataclass(frozen=True)
class _Begun(Generic[L]):
    """A load whose reads have begun, or what was wrong before any of them."""

    load: L
    plan: "LoadPlan | QloadError"
    ahead: Ahead | None = None

    @property
    def late(self) -> Sequence[LateElements]:
        """What is not read ahead."""
        return () if isinstance(self.plan, QloadError) else self.plan.late

    @property
    def nbytes(self) -> int:
        return sum(late.nbytes for late in self.late) + (self.ahead.nbytes if self.ahead else 0)

    def begin_late(self, reader: ReaderAhead) -> None:
        """What is not read ahead goes where it stays, as far as that is known."""
        if reader.moves is not None:
            for late in self.late:
                late.begin(reader.moves)


def _stream(weights: StreamOwner, loader: WeightsLoader, loads: Iterator[L]) -> Iterator[tuple[L, Weight]]:
    begun: deque[_Begun[L]] = deque()
    placed = PlacedFacts(weights)
    with ExitStack() as stack:
        storage, reader = weights.storage, None
        if isinstance(storage, FillingStorage) and weights.device.type != "meta":
            reader = stack.enter_context(ReaderAhead(storage, weights.device))
        more, ahead = True, 0  # bytes
        while more or begun:
            while more and len(begun) < MOST and (not begun or ahead < WINDOW):
                for load in islice(loads, 1):
                    begun.append(_begin(weights, loader, load, reader))
                    ahead += begun[-1].nbytes
                    break
                else:
                    more = False
            if begun:
                ahead -= begun[0].nbytes
                moving = reader is not None and reader.moves is not None and any(each.late for each in begun)
                with one_thread() if moving else nullcontext():  # others have the cores, or will have them
                    finished = _finish(weights, begun.popleft(), placed, stack)
                if reader is not None:
                    for each in begun:
                        each.begin_late(reader)
                yield finished


def _begin(weights: StreamOwner, loader: WeightsLoader, load: L, reader: ReaderAhead | None) -> _Begun[L]:
    try:
        if isinstance(load, str):
            plan = loader.plan(weights, [Part(load)], None)
        else:
            check_type("loads", load, Load)
            plan = loader.plan(weights, parts_of(weights, loader, load), load.split)
        if reader is None:
            return _Begun(load, plan)
        reads = [(weights._stored(name), index) for name, index in plan.reads]
        return _Begun(load, plan, reader.begin(reads, weights.storage))
    except QloadError as error:
        return _Begun(load, error)


def _finish(
    weights: StreamOwner, begun: _Begun[L], placed: "PlacedFacts", stack: ExitStack
) -> tuple[L, Weight]:
    if isinstance(begun.plan, QloadError):
        raise begun.plan
    if begun.ahead is None:
        return begun.load, begun.plan.finish(weights)
    try:
        return begun.load, begun.plan.finish(AheadSource(weights, begun.ahead, placed, stack))
    finally:
        begun.ahead.close()


class AheadSource:
    """What `Weights` holds, and at hand what was read ahead of it."""

    def __init__(self, inner: StreamOwner, ahead: Ahead, placed: "PlacedFacts", stack: ExitStack) -> None:
        self.inner, self.ahead = inner, ahead
        self.at_the_end = stack.callback  # what is to be done when the stream ends
        self.process_group, self.nonfinite = inner.process_group, inner.nonfinite
        self.has_tensor, self.info, self.missing = inner.has_tensor, inner.info, inner.missing
        self.take, self.note = inner.take, inner.note
        self.read_fact, self.place = inner.read_fact, placed.place

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """As the inner source."""
        stored = self.inner._stored(name)
        tensor = self.ahead.take(stored, index)
        if tensor is None:
            return self.inner.read(name, index, role=role)
        here = tensor if tensor.device == self.inner.device else tensor.to(self.inner.device)
        return by_role(stored, here, self.inner.dtype, role)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two facts of one shape are equal: those of layers that are alike mostly lie in one place."""
    lies = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return lies or torch.equal(one, other)


class PlacedFacts:
    """Facts on a CUDA device, which most layers of a model have in common: each goes over the bus once."""

    def __init__(self, inner: StreamOwner) -> None:
        self.inner = inner
        self._held: dict[Any, tuple[Tensor, Tensor]] = {}  # of a kind the last one, here and there

    def place(self, fact: Tensor) -> Tensor:
        """As the inner source; memory of its own each time."""
        device = self.inner.device
        if device.type != "cuda" or fact.nbytes > SMALL:
            return self.inner.place(fact)
        kind = fact.dtype, fact.shape, stream_on(device)
        held = self._held.get(kind)
        if held is None or not _same(held[0], fact):
            if len(self._held) >= FACTS:
                self._held.clear()
            held = self._held[kind] = fact, self.inner.place(fact)
        return held[1].clone()
