"""`TensorSource`, the tensors that a loader reads, and `WrappedSource`, another source with changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from qload.errors import MissingTensorError
from qload.lazy_torch import Tensor, torch
from qload.parallel import ProcessGroup
from qload.sentences import Digit
from qload.spec import Role, named
from qload.storage import FileRange, TensorInfo

Index = tuple[slice, ...]
Nonfinite = Literal["error", "allow"]


class Rectangle(NamedTuple):
    """Slices of the tensor `name`, to be read by a load; () is the whole tensor."""

    name: str
    slices: Index


class FileElements(Protocol):
    """Unread elements of a stored tensor, contiguous in a file."""

    @property
    def place(self) -> FileRange:
        """Range of the file."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""

    def move(self, target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
        """Move elements of `bits` bits by digits into `target`; False: the target is undefined."""


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors of one rank: names resolved, on its device, cast by role.

    A subclass implements `has_tensor`, `info`, `read`, `take`, `note` and `missing`. The other methods have
    defaults; a source overrides them to save copies and waits.

    Attributes
    ----------
    process_group
        Rank of this process, and the number of ranks.
    nonfinite
        "error": loads refuse scales that are NaN or infinite; "allow": loads accept them.
    at_end
        Register a function to call at the end of a stream of loads; None outside of a stream.
    """

    process_group: ProcessGroup
    nonfinite: Nonfinite = "error"
    at_end: Callable[[Callable[[], object]], object] | None = None

    def has_tensor(self, name: str) -> bool:
        """Return whether a tensor is stored under `name`, or under an alias or prefix of it."""

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file of the tensor `name`, from its header; MissingTensorError."""

    def read(self, name: str, index: Index = (), *, role: Role) -> Tensor:
        """Read the slices `index` of the tensor `name`, onto the device and in the dtype of its `role`."""

    def take(self, names: Iterable[str]) -> None:
        """Enter the tensors `names` into the ledger as used by a load."""

    def note(self, text: str) -> None:
        """Enter a harmless contradiction, as `text`, into the ledger."""

    def missing(self, name: str, hint: str = "") -> MissingTensorError:
        """Create the error for the missing tensor `name`: names tried, similar names, and `hint`."""

    def headers(self, prefix: str, suffixes: Iterable[str]) -> Mapping[str, TensorInfo]:
        """Headers of the stored tensors under `prefix`, by the `suffixes` of their names."""
        names = {suffix: named(prefix, suffix) for suffix in suffixes}
        return {suffix: self.info(name) for suffix, name in names.items() if self.has_tensor(name)}

    def read_into(self, name: str, index: Index, out: Tensor, *, role: Role) -> None:
        """Read into `out`, of the slices' shape and dtype; `name`, `index`, `role` as in `read`."""
        out.copy_(self.read(name, index, role=role))

    def read_fact(self, name: str, role: Role) -> Tensor:
        """Read the small tensor `name` of a `role`, which decides a load: on the CPU, if the source can."""
        return self.read(name, role=role)

    def place(self, fact: Tensor) -> Tensor:
        """Copy a `fact`, or a part of it, to the device."""
        return fact.clone()

    def file_elements(self, name: str, index: Index) -> FileElements | None:
        """Slices `index` of the tensor `name` as a range of a file; None without a file, and for a GPU."""
        return None

    def readable(self, name: str) -> tuple[tuple[int, int], ...] | None:
        """(start, stop) of the readable part of `name` along each axis; None for a part without bounds."""
        return tuple(zip(repeat(0), self.info(name).shape, strict=False))

    def names(self) -> Collection[str]:
        """Names of all stored tensors; empty for a source without a list."""
        return ()

    def is_single_layer(self, prefix: str) -> bool:
        """Return whether the model's architecture has a single layer `prefix`, outside of experts."""
        return False

    def whole(self) -> TensorSource:
        """The innermost source, with all tensors as stored."""
        return self


Override = Callable[[str, Index, Role], Tensor | None]


class WrappedSource(TensorSource):
    """Another source, with changes.

    Parameters
    ----------
    inner
        The other source.
    override
        Returns a tensor instead of a read of the inner source; None for a read.
    ledger
        "inner": entries go to the inner source. "none": entries are dropped. "later": `commit` hands entries
        to the inner source.
    """

    def __init__(
        self,
        inner: TensorSource,
        override: Override | None = None,
        *,
        ledger: Literal["inner", "none", "later"] = "inner",
    ) -> None:
        self.inner, self.process_group, self.nonfinite = inner, inner.process_group, inner.nonfinite
        self._override, self._ledger = override, ledger
        self._taken, self._notes = list[str](), dict[str, None]()

    def has_tensor(self, name: str) -> bool:
        """Return whether the inner source has a tensor."""
        return self.inner.has_tensor(name)

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file of a tensor of the inner source."""
        return self.inner.info(name)

    def headers(self, prefix: str, suffixes: Iterable[str]) -> Mapping[str, TensorInfo]:
        """Headers of the tensors under a prefix, by the `has_tensor` and `info` of a subclass."""
        kind = type(self)
        if kind.has_tensor is not WrappedSource.has_tensor or kind.info is not WrappedSource.info:
            return super().headers(prefix, suffixes)
        return self.inner.headers(prefix, suffixes)

    def read(self, name: str, index: Index = (), *, role: Role) -> Tensor:
        """Read the override of a tensor, else the tensor of the inner source."""
        tensor = None if self._override is None else self._override(name, index, role)
        return self.inner.read(name, index, role=role) if tensor is None else tensor

    def take(self, names: Iterable[str]) -> None:
        """Enter tensors into the ledger, or keep their names for `commit`."""
        if self._ledger == "inner":
            self.inner.take(names)
        elif self._ledger == "later":
            self._taken += names

    def note(self, text: str) -> None:
        """Enter a note into the ledger, or keep it for `commit`."""
        if self._ledger == "inner":
            self.inner.note(text)
        elif self._ledger == "later":
            self._notes[text] = None

    def commit(self) -> None:
        """Hand notes and names, each note once, to the inner source: the load succeeded."""
        for text in self._notes:
            self.inner.note(text)
        self.inner.take(self._taken)

    def missing(self, name: str, hint: str = "") -> MissingTensorError:
        """Create the inner source's error for a missing tensor."""
        return self.inner.missing(name, hint)

    def is_single_layer(self, prefix: str) -> bool:
        """Return whether the inner source's architecture has a single layer of this name."""
        return self.inner.is_single_layer(prefix)

    def whole(self) -> TensorSource:
        """The innermost source, with all tensors as stored."""
        return self.inner.whole()


def source_without_values(inner: TensorSource, field: str) -> WrappedSource:
    """A source for decisions: tensors named `field` have their shape and no values; no ledger entries.

    An empty `field` keeps all values. Scales are not examined: the load itself refuses.
    """

    def zeros(name: str, index: Index, role: Role) -> Tensor | None:
        if not field or name.rpartition(".")[2] != field:
            return None
        nothing = inner.read(name, (slice(0, 0),), role=role)
        return nothing.new_zeros(()).expand(inner.info(name).shape)[index]  # all entries share one element

    source = WrappedSource(inner, zeros, ledger="none")
    source.nonfinite = "allow"
    return source


def source_without_codes(inner: TensorSource, layer: Any) -> WrappedSource:
    """A source for decisions about a described layer, without its codes: the first tensor of its format.

    Codes are kept if scales among their bytes decide.
    """
    codes = layer.specs[0]
    field = "" if codes.decisive else layer.names.full(codes.name).rpartition(".")[2]
    return source_without_values(inner, field)
