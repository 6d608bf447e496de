"""What a checkpoint holds is not what it has to hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from qload.errors.base import QloadError, lines


@dataclass(eq=False)
class MissingTensorError(QloadError, KeyError):
    """A tensor is not in the storage under any name that could mean it.

    Raised by storages and by every load that needs the tensor.

    Attributes
    ----------
    tensor
        The name asked for.
    tried
        The names under which it was looked for: its own, its aliases, either under the prefix.
    near, hint
        Names that are stored and look like it, or (); a further line for the reader, or "".
    """

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
    """A tensor's shape is not what its declaration and its siblings say.

    Raised when a layer is loaded, a typed weight is made, or a tensor is handed to a function or a layer.

    Attributes
    ----------
    tensor
        The tensor's full name.
    expected
        The shape it has to have, with the formula: "(32, 160) = (K*4/32, N)".
    got
        The shape it has.
    file, hint
        The file it lies in, or None; a further line for the reader, or "".
    """

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
    """A tensor's dtype is none of those its declaration allows.

    Raised when a layer is loaded, a typed weight is made, or a tensor is handed to a function or a layer.

    Attributes
    ----------
    tensor, expected, got
        The tensor's full name, the dtypes it may have, and the one it has, by name.
    file, hint
        The file it lies in, or None; a further line for the reader, or "".
    """

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
    """An index tensor points outside of what it indexes.

    Raised when a layer is loaded or a typed weight is made: kernels follow such a tensor without looking.

    Attributes
    ----------
    tensor, value, at, count
        The full name of the index tensor, the first wrong value, where it stands, and how many are wrong.
    limit, also
        Lawful values are at least 0 and less than this; what is asked of them besides, or "".
    file
        The file it lies in, or None.
    """

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
    """Two sources that have to agree do not.

    Raised where a layer's tensors contradict each other or the config, where the parts of a fused layer are
    not alike, and where values have no lawful meaning, as NaN has none for a quantizer.

    Attributes
    ----------
    tensor, what
        The tensor or layer, or several of them, and what is wrong, in words.
    expected, got, hint
        What the one source says, and what the other; a further line for the reader, or "".
    """

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
    """An index that its readers take in two ways: a `g_idx` of zeros where there are several groups.

    Raised when such a layer is loaded. The fields are those of MismatchError.
    """

    rule: ClassVar[str] = "index-ambiguous"


@dataclass(eq=False)
class FieldValueError(MismatchError):
    """A packed field holds a value that its declaration does not allow, as 2:4 metadata can.

    Raised when a typed weight is made of it. The fields are those of MismatchError.
    """

    rule: ClassVar[str] = "field-value"


@dataclass(eq=False)
class NonfiniteScaleError(MismatchError):
    """A scale of a layer is NaN or infinite, as memory that no quantizer filled may be.

    Raised when the layer is loaded, unless `nonfinite="allow"`. The fields are those of MismatchError.
    """

    rule: ClassVar[str] = "scale-value"


@dataclass(eq=False)
class ExcludedModuleError(MismatchError):
    """A layer that the config leaves out, and whose tensors are quantized.

    Raised when the layer is loaded. The fields are those of MismatchError.
    """

    rule: ClassVar[str] = "excluded-module"


@dataclass(eq=False)
class TwoFormatsError(MismatchError):
    """A layer whose tensors belong to two formats.

    Raised when the layer is loaded. The fields are those of MismatchError.
    """

    rule: ClassVar[str] = "two-formats"


@dataclass(eq=False)
class StorageError(QloadError, ValueError):
    """A file is not a checkpoint that can be trusted, or was read after its storage was closed.

    Raised by `SafetensorsStorage`, and so by `open_checkpoint`.

    Attributes
    ----------
    file
        The file or directory.
    rule
        The stable id under which `verify` reports it: here it belongs to the error, not to its class.
    detail, remedy
        What is wrong, and what to do, or "".
    tensor
        The tensor that is at fault, or None.
    """

    file: str
    rule: str = field()  # type: ignore[misc]
    detail: str
    tensor: str | None = None
    remedy: str = ""

    def __str__(self) -> str:
        where = f"{self.file}: {self.tensor}: " if self.tensor else f"{self.file}: "
        return lines(where + self.detail, self.remedy and f"remedy   {self.remedy}")


@dataclass(eq=False)
class HubUnreachableError(StorageError):
    """The hub gave no answer for now, or must not be asked: what the local cache holds is all there is.

    Raised by `qload.hub`. The fields are those of StorageError.
    """


@dataclass(eq=False)
class ConfigError(QloadError, ValueError):
    """A config file does not say what it has to say.

    Raised by `open_checkpoint` and `loader_from_config`: what is malformed never becomes a default.

    Attributes
    ----------
    file, key
        The file, and the dotted path of the key in it.
    expected, got, hint
        What the key may say, and what it says; a further line for the reader, or "".
    """

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
    """A format that is known by name, or not at all, but not read here.

    Raised by `open_checkpoint` and `loader_from_config`, and when a layer turns out to be of such a format.

    Attributes
    ----------
    format, reason
        The format's name, and why it is not read, in words.
    known
        The names of what is read, or ().
    remedy
        What does read it, or "".
    """

    rule: ClassVar[str] = "unsupported-format"

    format: str
    reason: str
    known: Sequence[str] = ()
    remedy: str = ""

    def __str__(self) -> str:
        return lines(
            f"{self.format}: not read by this qload",
            f"reason   {self.reason}",
            self.known and f"known    {', '.join(self.known)}",
            self.remedy and f"remedy   {self.remedy}",
        )


@dataclass(eq=False)
class UnreadTensorsError(QloadError, NotImplementedError):
    """Some tensors of a checkpoint are in a form that no format reads.

    Everything that loads, runs, converts or shards a whole checkpoint raises it before any weight is read: an
    unread tensor is neither used as a value nor copied.

    Attributes
    ----------
    unread
        Tensor name -> the reason and the remedy.
    nbytes
        The bytes of all these tensors.
    """

    rule: ClassVar[str] = "unread-tensor"

    unread: Mapping[str, str]
    nbytes: int = 0

    def __str__(self) -> str:
        names, shown = list(self.unread), 4
        more = f" and {len(names) - shown} more" if names[shown:] else ""
        reasons = list(dict.fromkeys(self.unread.values()))
        other = f" (and {len(reasons) - 1} other reasons)" if reasons[1:] else ""
        return lines(
            f"{names[0]}: not read by any format",
            f"tensors  {', '.join(names[:shown])}{more}; {self.nbytes} bytes in all",
            f"reason   {reasons[0]}{other}",
        )
