"""What a loader asks of whoever holds the tensors: `Weights`, over any storage."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from qload.errors import MissingTensorError
from qload.parallel import ProcessGroup
from qload.sentences import Digit
from qload.spec import Role
from qload.storage import TensorInfo


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors as one rank sees them: names resolved, moved to its device, cast by role."""

    @property
    def process_group(self) -> ProcessGroup:
        """Which rank this is, and of how many."""

    def has_tensor(self, name: str) -> bool:
        """Whether a name, one of its aliases, or either under the prefix is stored."""

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file, from the header alone; MissingTensorError."""

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """Those elements, on the device, in the dtype its role allows."""

    def take(self, names: Iterable[str]) -> None:
        """Enter into the ledger that a load has used these tensors."""

    def note(self, text: str) -> None:
        """Enter into the ledger that something disagreed without harm."""

    def missing(self, name: str, hint: str = "") -> MissingTensorError:
        """The error that says what was tried and what there is instead."""


class WrappedSource:
    """What an inner source holds, as it says it: what sources that stand before another one start from."""

    def __init__(self, inner: TensorSource) -> None:
        self.inner, self.process_group = inner, inner.process_group
        self.nonfinite: str = getattr(inner, "nonfinite", "error")

    def has_tensor(self, name: str) -> bool:
        """As the inner source."""
        return self.inner.has_tensor(name)

    def info(self, name: str) -> TensorInfo:
        """As the inner source."""
        return self.inner.info(name)

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """As the inner source."""
        return self.inner.read(name, index, role=role)

    def take(self, names: Iterable[str]) -> None:
        """As the inner source."""
        self.inner.take(names)

    def note(self, text: str) -> None:
        """As the inner source."""
        self.inner.note(text)

    def missing(self, name: str, hint: str = "") -> MissingTensorError:
        """As the inner source."""
        return self.inner.missing(name, hint)


class Rectangle(NamedTuple):
    """The elements of the tensor `name` within these slices, which a load will read."""

    name: str
    slices: tuple[slice, ...]


class FileElements(Protocol):
    """Elements of a stored tensor that lie in one piece in a file, not read yet."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor."""

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""

    def move(self, target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
        """Elements of `bits` bits, from digits to digits of a `target`; False: what that holds is nothing."""


AskedMove = tuple[FileElements, Tensor, int, Sequence[Digit]]  # to a target, of so many bits, by digits


class MovesUnderway(Protocol):
    """Moves that threads have begun."""

    @property
    def made(self) -> Sequence[bool]:
        """Of each whether it was made, once that is known; what the target of another holds is nothing."""


class FileMover(Protocol):
    """Threads that move elements from their files."""

    def begin(self, asked: Sequence[AskedMove]) -> MovesUnderway | None:
        """Begin with these, to new memory; None where they cannot."""


class LateElements(Protocol):
    """Elements of a load that are not read ahead of it, and whose way to where they stay may begin before."""

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""

    def begin(self, mover: FileMover) -> None:
        """Begin on other threads, where it is known by now where they go; else nothing happens."""


def in_file(source: TensorSource, name: str, index: tuple[slice, ...]) -> FileElements | None:
    """Elements of a tensor in their file; None where the source has none, or they are not for the CPU."""
    found: Callable[[str, tuple[slice, ...]], FileElements | None] | None = getattr(source, "in_file", None)
    return None if found is None else found(name, index)


def fact_of(source: TensorSource, name: str, role: Role) -> Tensor:
    """All of a small tensor that decides, on the CPU where the source can: nobody waits for a device."""
    read: Callable[[str], Tensor] | None = getattr(source, "read_fact", None)
    return source.read(name, role=role) if read is None else read(name)


def placed(source: TensorSource, fact: Tensor) -> Tensor:
    """A part of what `fact_of` has read, in memory of its own, where the source puts tensors."""
    place: Callable[[Tensor], Tensor] | None = getattr(source, "place", None)
    return fact.clone() if place is None else place(fact)


@runtime_checkable
class FillingSource(Protocol):
    """A source of tensors that reads into memory of the caller's, which spares copies."""

    def read_into(self, name: str, index: tuple[slice, ...], out: Tensor, *, role: Role) -> None:
        """What `read` would hand out, written to `out`, a tensor of that shape, dtype and device."""


def fill(source: TensorSource, name: str, index: tuple[slice, ...], out: Tensor, role: Role) -> None:
    """Read those elements into a tensor, straight where the source can."""
    if isinstance(source, FillingSource):
        source.read_into(name, index, out, role=role)
    else:
        out.copy_(source.read(name, index, role=role))
