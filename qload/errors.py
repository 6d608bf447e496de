"""Every error qload raises on purpose: facts as fields, text made on print.

The tensor (or file) comes first, `expected` stands above `got`, and a remedy is given only
where it is certain. The facts survive pickling, so that a rank can hand them to another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


class QloadError(Exception):
    """Base of every error qload raises on purpose. `rule` is the stable id under which it is reported."""

    rule: ClassVar[str] = "error"

    def __reduce__(self) -> tuple[Any, ...]:
        if not hasattr(self, "__dataclass_fields__"):
            return type(self), self.args
        return type(self), tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]


@dataclass(eq=False)
class MissingTensorError(QloadError, KeyError):
    """A tensor is not in the storage under any name that could mean it."""

    rule: ClassVar[str] = "missing-tensor"

    tensor: str
    tried: Sequence[str] = ()
    near: Sequence[str] = ()
    hint: str = ""

    def __str__(self) -> str:
        tried = [name for name in self.tried if name != self.tensor]
        return _lines(
            f"{self.tensor}: not in the checkpoint",
            tried and f"tried    {', '.join([self.tensor, *tried])}",
            self.near and f"there is {', '.join(self.near)}",
            self.hint,
        )


@dataclass(eq=False)
class ShapeError(QloadError, ValueError):
    """A tensor's shape is not what its declaration and its siblings say."""

    rule: ClassVar[str] = "tensor-shape"

    tensor: str
    expected: str  # with the formula: "(32, 160) = (K*4/32, N)"
    got: Sequence[int]
    file: str | None = None
    hint: str = ""

    def __str__(self) -> str:
        return _lines(
            f"{self.tensor}: wrong shape",
            f"expected {self.expected}",
            f"got      {tuple(self.got)}",
            self.file and f"in       {self.file}",
            self.hint,
        )


@dataclass(eq=False)
class DtypeError(QloadError, TypeError):
    """A tensor's dtype is none of those its declaration allows."""

    rule: ClassVar[str] = "tensor-dtype"

    tensor: str
    expected: Sequence[str]
    got: str
    file: str | None = None
    hint: str = ""

    def __str__(self) -> str:
        return _lines(
            f"{self.tensor}: wrong dtype",
            f"expected {' or '.join(self.expected)}",
            f"got      {self.got}",
            self.file and f"in       {self.file}",
            self.hint,
        )


@dataclass(eq=False)
class IndexValueError(QloadError, ValueError):
    """An index tensor points outside of what it indexes."""

    rule: ClassVar[str] = "index-range"

    tensor: str
    value: int
    at: int
    limit: int
    count: int
    file: str | None = None

    def __str__(self) -> str:
        return _lines(
            f"{self.tensor}: index out of range",
            f"expected 0 <= index < {self.limit}",
            f"got      {self.value} at {self.at}" + (f" ({self.count} in all)" if self.count > 1 else ""),
            self.file and f"in       {self.file}",
        )


@dataclass(eq=False)
class CutError(QloadError, ValueError):
    """A cut falls inside of something that has to stay whole."""

    rule: ClassVar[str] = "tensor-parallel"

    tensor: str
    dim: str  # "K" or "N"
    size: int
    cut: int
    block: int  # 0: this dimension is never cut
    why: str  # the axis that binds, as declared
    world: int | None = None
    lawful: Sequence[int] = ()  # world sizes whose every cut is lawful

    def __str__(self) -> str:
        ranks = f" for {self.world} ranks" if self.world else ""
        below = self.cut // self.block * self.block if self.block else 0
        near = [at for at in (below, below + self.block) if 0 <= at <= self.size] if self.block else []
        return _lines(
            f"{self.tensor}: cannot cut {self.dim} = {self.size} at {self.cut}{ranks}",
            f"cuts must be multiples of {self.block}   {self.why}"
            if self.block
            else f"never cut   {self.why}",
            near and f"nearest  {' or '.join(map(str, near))}",
            self.world and f"lawful   {_worlds(self.lawful)}",
        )


@dataclass(eq=False)
class DivideError(QloadError, ValueError):
    """A dimension does not divide into the parts asked for."""

    rule: ClassVar[str] = "tensor-parallel"

    tensor: str
    dim: int | str
    size: int
    parts: str  # "4 ranks", "3 blocks", "blocks of 1 + 2"
    hint: str = ""

    def __str__(self) -> str:
        return _lines(f"{self.tensor}: {self.dim} = {self.size} does not divide into {self.parts}", self.hint)


@dataclass(eq=False)
class MismatchError(QloadError, ValueError):
    """Two sources that have to agree do not."""

    rule: ClassVar[str] = "mismatch"

    tensor: str
    what: str
    expected: str
    got: str
    hint: str = ""

    def __str__(self) -> str:
        return _lines(
            f"{self.tensor}: {self.what}", f"expected {self.expected}", f"got      {self.got}", self.hint
        )


@dataclass(eq=False)
class AmbiguousIndexError(MismatchError):
    """An index that its readers take in two ways."""

    rule: ClassVar[str] = "index-ambiguous"


@dataclass(eq=False)
class TwoFormatsError(MismatchError):
    """A layer whose tensors belong to two formats."""

    rule: ClassVar[str] = "two-formats"


@dataclass(eq=False)
class CastError(QloadError, OverflowError):
    """A cast would turn finite values into infinities."""

    rule: ClassVar[str] = "cast"

    tensor: str
    source: str
    target: str
    value: float
    count: int

    def __str__(self) -> str:
        return _lines(
            f"{self.tensor}: a cast from {self.source} to {self.target} overflows",
            f"got      {self.value:g}" + (f" ({self.count} values in all)" if self.count > 1 else ""),
            "remedy   load with dtype=None, which keeps what is stored, or with a wider dtype",
        )


@dataclass(eq=False)
class StorageError(QloadError, ValueError):
    """A file is not a checkpoint that can be trusted. `rule` is the stable id `verify` reports."""

    file: str
    rule: str = field()  # type: ignore[misc]
    detail: str
    tensor: str | None = None
    remedy: str = ""

    def __str__(self) -> str:
        where = f"{self.file}: {self.tensor}: " if self.tensor else f"{self.file}: "
        return _lines(where + self.detail, self.remedy and f"remedy   {self.remedy}")


@dataclass(eq=False)
class ConfigError(QloadError, ValueError):
    """A config file does not say what it has to say."""

    rule: ClassVar[str] = "config"

    file: str
    key: str
    expected: str
    got: str
    hint: str = ""

    def __str__(self) -> str:
        return _lines(
            f"{self.file}: {self.key}", f"expected {self.expected}", f"got      {self.got}", self.hint
        )


@dataclass(eq=False)
class UnsupportedFormatError(QloadError, NotImplementedError):
    """A format that is known by name, or not at all, but not read here."""

    rule: ClassVar[str] = "unsupported-format"

    format: str
    reason: str
    known: Sequence[str] = ()

    def __str__(self) -> str:
        return _lines(
            f"{self.format}: not read by this qload",
            f"reason   {self.reason}",
            self.known and f"known    {', '.join(self.known)}",
        )


@dataclass(eq=False)
class RepackError(QloadError, ValueError):
    """A weight cannot be said in another layout."""

    rule: ClassVar[str] = "repack"

    source: str
    layout: str
    reason: str

    def __str__(self) -> str:
        return _lines(f"{self.source} to {self.layout}: cannot repack", f"reason   {self.reason}")


@dataclass(eq=False)
class PatternError(QloadError, ValueError):
    """A layout's sentence is not a permutation, or does not fit a tensor."""

    rule: ClassVar[str] = "pattern"

    pattern: str
    detail: str

    def __str__(self) -> str:
        return _lines(f"{self.pattern!r}: {self.detail}")


@dataclass(eq=False)
class ArgumentError(QloadError, ValueError):
    """A caller's argument is not one qload can act on."""

    rule: ClassVar[str] = "argument"

    argument: str
    expected: str
    got: str

    def __str__(self) -> str:
        return _lines(f"{self.argument}", f"expected {self.expected}", f"got      {self.got}")


def _lines(first: str, *rest: object) -> str:
    return "\n  ".join([first, *(str(line) for line in rest if line)])


def _worlds(lawful: Sequence[int]) -> str:
    return "world sizes " + ", ".join(map(str, lawful)) if lawful else "none but the whole"
