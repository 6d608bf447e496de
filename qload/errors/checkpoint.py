"""What a checkpoint holds is not what it has to hold."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from qload.errors.base import QloadError, lines


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
        return lines(
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
        return lines(
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
        return lines(
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
    also: str = ""  # what is asked of the values beside their range

    def __str__(self) -> str:
        return lines(
            f"{self.tensor}: index out of range",
            f"expected 0 <= index < {self.limit}" + (f", {self.also}" if self.also else ""),
            f"got      {self.value} at {self.at}" + (f" ({self.count} in all)" if self.count > 1 else ""),
            self.file and f"in       {self.file}",
        )


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
        return lines(
            f"{self.tensor}: {self.what}", f"expected {self.expected}", f"got      {self.got}", self.hint
        )


@dataclass(eq=False)
class AmbiguousIndexError(MismatchError):
    """An index that its readers take in two ways."""

    rule: ClassVar[str] = "index-ambiguous"


@dataclass(eq=False)
class FieldValueError(MismatchError):
    """A packed field holds a value that its declaration does not allow."""

    rule: ClassVar[str] = "field-value"


@dataclass(eq=False)
class ExcludedModuleError(MismatchError):
    """A layer that the config leaves out, and whose tensors are quantized."""

    rule: ClassVar[str] = "excluded-module"


@dataclass(eq=False)
class TwoFormatsError(MismatchError):
    """A layer whose tensors belong to two formats."""

    rule: ClassVar[str] = "two-formats"


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
        return lines(where + self.detail, self.remedy and f"remedy   {self.remedy}")


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
        return lines(
            f"{self.file}: {self.key}", f"expected {self.expected}", f"got      {self.got}", self.hint
        )


@dataclass(eq=False)
class ConfigsDisagreeError(ConfigError):
    """Two config files of a checkpoint say different things of its layers."""

    rule: ClassVar[str] = "config-side-file"


@dataclass(eq=False)
class UnsupportedFormatError(QloadError, NotImplementedError):
    """A format that is known by name, or not at all, but not read here."""

    rule: ClassVar[str] = "unsupported-format"

    format: str
    reason: str
    known: Sequence[str] = ()

    def __str__(self) -> str:
        return lines(
            f"{self.format}: not read by this qload",
            f"reason   {self.reason}",
            self.known and f"known    {', '.join(self.known)}",
        )
