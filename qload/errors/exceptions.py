"""Exceptions of qload: facts as fields, formatted when they are printed.

A text begins with the tensor or file; `expected` stands above `got`, and only a certain remedy is given.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

MAX_NAMES = 4  # of tensors in a text


class QloadError(Exception):
    """Base class of the errors of qload: facts as fields, formatted when they are printed.

    Each subclass also derives from a built-in error, such as ValueError or KeyError. `rule` is the stable id
    in reports of `verify`. Errors can be pickled, so one rank can send them to another.
    """

    rule: ClassVar[str] = "error"

    def __reduce__(self) -> tuple[Any, ...]:
        if not hasattr(self, "__dataclass_fields__"):
            return type(self), self.args
        return type(self), tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]


def format_error(title: str, *lines: object, **facts: object) -> str:
    """Format an error: its title, and indented below it the facts by name, then the other lines.

    Facts that are None, and empty lines, are left out.
    """
    named = (f"{name:8} {fact}" for name, fact in facts.items() if fact is not None)
    return "\n  ".join([title, *named, *(str(line) for line in lines if line)])


def list_names(names: Sequence[str], limit: int = MAX_NAMES) -> str:
    """List the first names, at most `limit`, and count the others."""
    shown, more = ", ".join(names[:limit]), len(names) - limit
    return f"{shown} and {more} more" if more > 0 else shown


@dataclass(eq=False)
class CutError(QloadError, ValueError):
    """A tensor cannot be cut at the boundary between two ranks or parts.

    Raised by sharded loads (`get_weights_col`, `get_weights_row` and the like) on all ranks, before anything
    is read, and by `create_weights` of a quantization method.

    Attributes
    ----------
    tensor
        Full name of the tensor.
    dim, size, cut
        The dimension, "N" or "K", its size, and the position of the cut.
    block
        Cuts are lawful at multiples of it; 0: the dimension is never cut.
    why
        The declaration of the axis that forbids the cut.
    world, lawful
        Number of ranks, and the lawful numbers of ranks; None and () for a cut between parts.
    """

    rule: ClassVar[str] = "tensor-parallel"

    tensor: str
    dim: str
    size: int
    cut: int
    block: int
    why: str
    world: int | None = None
    lawful: Sequence[int] = ()

    def __str__(self) -> str:
        ranks = f" for {self.world} ranks" if self.world else ""
        below = self.cut // self.block * self.block if self.block else 0
        above = min(below + self.block, self.size)  # the end of a dimension is lawful too
        near = sorted({below, above} - {self.cut}) if self.block else []
        lawful_cuts = f"cuts must be multiples of {self.block}" if self.block else "never cut"
        place = f"cannot cut {self.dim} = {self.size} at {self.cut}{ranks}"
        return format_error(
            f"{self.tensor}: {place}\n  {lawful_cuts}   {self.why}",
            nearest=" or ".join(map(str, near)) or None,
            lawful=worlds(self.lawful) if self.world else None,
        )


@dataclass(eq=False)
class DivideError(QloadError, ValueError):
    """A dimension does not divide into the requested parts.

    Raised by sharded loads, and by the tensor-parallel layers of `qload.methods`.

    Attributes
    ----------
    tensor
        The tensor or layer.
    dim, size
        Number or name of the dimension, and its size.
    parts
        The requested parts, such as "4 ranks", "3 blocks" or "blocks of 1 + 2".
    hint
        Another line of text, or "".
    """

    rule: ClassVar[str] = "tensor-parallel"

    tensor: str
    dim: int | str
    size: int
    parts: str
    hint: str = ""

    def __str__(self) -> str:
        dim = f"dimension {self.dim}" if isinstance(self.dim, int) else self.dim
        return format_error(
            f"{self.tensor}: {dim} = {self.size} does not divide into {self.parts}", self.hint
        )


@dataclass(eq=False)
class CastError(QloadError, OverflowError):
    """A cast would overflow or underflow.

    Raised when tensors are loaded with a dtype, repacked (FP8 scales for Marlin's kernel), quantized, or
    prepared for a kernel.

    Attributes
    ----------
    tensor
        Name of the tensor.
    source, target
        Names of the two dtypes.
    value, count
        The first value out of range, and the number of such values.
    remedy
        A way to avoid the cast.
    """

    rule: ClassVar[str] = "cast"

    tensor: str
    source: str
    target: str
    value: float
    count: int
    remedy: str = "load with dtype=None to keep the stored dtype, or with a wider dtype"

    def __str__(self) -> str:
        fault = "underflows" if abs(self.value) < 1 else "overflows"
        count = f" ({self.count} values in all)" if self.count > 1 else ""
        title = f"{self.tensor}: a cast from {self.source} to {self.target} {fault}"
        return format_error(title, got=f"{self.value:g}{count}", remedy=self.remedy)


@dataclass(eq=False)
class RepackError(QloadError, ValueError):
    """A weight cannot be expressed exactly in another layout.

    Raised by `repack` and by loaders that repack.

    Attributes
    ----------
    source
        Format of the weight, after the name of its layer if it has one.
    layout
        The requested layout.
    reason
        The reason as text.
    """

    rule: ClassVar[str] = "repack"

    source: str
    layout: str
    reason: str

    def __str__(self) -> str:
        return format_error(f"{self.source} to {self.layout}: cannot repack", reason=self.reason)


@dataclass(eq=False)
class KernelRefusedError(QloadError, ValueError, NotImplementedError):
    """A kernel does not support a layer.

    Raised by the constructors of `MPLinearKernel`s.

    Attributes
    ----------
    kernel
        Name of the kernel's class.
    reason
        The reason from `can_implement`.
    """

    rule: ClassVar[str] = "kernel"

    kernel: str
    reason: str

    def __str__(self) -> str:
        return format_error(f"{self.kernel}: cannot run this layer", reason=self.reason)


@dataclass(eq=False)
class NoKernelError(QloadError, ValueError):
    """No kernel supports a layer.

    Raised by `choose_mp_linear_kernel`.

    Attributes
    ----------
    layer
        Type of codes and shape of the layer, as text.
    reasons
        Name of a kernel -> reason against it.
    """

    rule: ClassVar[str] = "kernel"

    layer: str
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        reasons = (f"{kernel:{width}}  {reason}" for kernel, reason in self.reasons.items())
        return format_error(f"{self.layer}: no kernel", *reasons)


@dataclass(eq=False)
class NotEnoughMemoryError(QloadError, MemoryError):
    """A device has too little memory for a model.

    Raised before the model is loaded, by `qload run` and `qload verify --logits`.

    Attributes
    ----------
    device
        Name of the device.
    needed, free
        Needed bytes, and free bytes of the device.
    """

    rule: ClassVar[str] = "memory"

    device: str
    needed: int
    free: int

    def __str__(self) -> str:
        needed, free = f"needed {self.needed} bytes", f"free   {self.free} bytes"
        return format_error(f"{self.device}: too little memory", needed, free)


@dataclass(eq=False)
class NotWarmError(QloadError, RuntimeError):
    """A layer was called before its scratch space was allocated.

    Raised by layers of the ExLlama kernel; `warm_up` allocates the space.

    Attributes
    ----------
    tensor
        Name of the weight.
    device
        Name of the device of the call.
    """

    rule: ClassVar[str] = "warm-up"

    tensor: str
    device: str

    def __str__(self) -> str:
        remedy = "call qload.warm_up(model, max_input_len) once the weights are processed"
        return format_error(f"{self.tensor}: no scratch space on {self.device}", remedy=remedy)


@dataclass(eq=False)
class PatternError(QloadError, ValueError):
    """A layout sentence is not a permutation, or does not fit a tensor.

    Raised by `Order`, `Packing` and the axes of a declaration.

    Attributes
    ----------
    pattern
        The sentence.
    detail
        The fault as text.
    """

    rule: ClassVar[str] = "pattern"

    pattern: str
    detail: str

    def __str__(self) -> str:
        return f"{self.pattern!r}: {self.detail}"


@dataclass(eq=False)
class ArgumentError(QloadError, ValueError):
    """An argument has a wrong type or value.

    Attributes
    ----------
    argument
        Name of the argument.
    expected, got
        Its allowed values and its value, as text.
    """

    rule: ClassVar[str] = "argument"

    argument: str
    expected: str
    got: str

    def __str__(self) -> str:
        return format_error(self.argument, expected=self.expected, got=self.got)


@dataclass(eq=False)
class UnknownMethodError(QloadError, KeyError):
    """No quantization method is registered under a name.

    Raised by `qload.methods.get_quantization_config`.

    Attributes
    ----------
    name
        The requested name.
    known
        The registered names.
    """

    rule: ClassVar[str] = "unknown-method"

    name: str
    known: Sequence[str]

    def __str__(self) -> str:
        known = ", ".join(self.known) or "none"
        return format_error(f"{self.name!r}: no such quantization method", known=known)


def worlds(lawful: Sequence[int]) -> str:
    """Format lawful world sizes for an error; without any, only one rank can load the tensor."""
    return "world sizes " + ", ".join(map(str, lawful)) if lawful else "only world size 1"


@dataclass(eq=False)
class MissingTensorError(QloadError, KeyError):
    """A tensor is missing under all of its names.

    Raised by storages and by every load of the tensor.

    Attributes
    ----------
    tensor
        The requested name.
    tried
        All names that were tried: the requested name and its aliases, with and without prefix.
    near, hint
        Similar names in the storage, or (); another line of text, or "".
    """

    rule: ClassVar[str] = "missing-tensor"

    tensor: str
    tried: Sequence[str] = ()
    near: Sequence[str] = ()
    hint: str = ""

    def __str__(self) -> str:
        others = [name for name in self.tried if name != self.tensor]
        return format_error(
            f"{self.tensor}: not in the checkpoint",
            self.hint,
            tried=", ".join([self.tensor, *others]) if others else None,
            stored=", ".join(self.near) or None,
        )


@dataclass(eq=False)
class ShapeError(QloadError, ValueError):
    """A tensor's shape contradicts its declaration or the other tensors of its layer.

    Raised when a layer is loaded, a typed weight is constructed, or a tensor is passed to a function or a
    layer.

    Attributes
    ----------
    tensor
        Full name of the tensor.
    expected
        Required shape, with its formula: "(32, 160) = (K*4/32, N)".
    got
        Shape of the tensor.
    file, hint
        File of the tensor, or None; another line of text, or "".
    """

    rule: ClassVar[str] = "tensor-shape"

    tensor: str
    expected: str
    got: Sequence[int]
    file: str | None = None
    hint: str = ""

    def __str__(self) -> str:
        facts = {"expected": self.expected, "got": tuple(self.got), "in": self.file or None}
        return format_error(f"{self.tensor}: wrong shape", self.hint, **facts)


@dataclass(eq=False)
class DtypeError(QloadError, TypeError):
    """A tensor's dtype is not allowed by its declaration.

    Raised when a layer is loaded, a typed weight is constructed, or a tensor is passed to a function or a
    layer.

    Attributes
    ----------
    tensor, expected, got
        Full name of the tensor, names of the allowed dtypes, and name of its dtype.
    file, hint
        File of the tensor, or None; another line of text, or "".
    """

    rule: ClassVar[str] = "tensor-dtype"

    tensor: str
    expected: Sequence[str]
    got: str
    file: str | None = None
    hint: str = ""

    def __str__(self) -> str:
        facts = {"expected": " or ".join(self.expected), "got": self.got, "in": self.file or None}
        return format_error(f"{self.tensor}: wrong dtype", self.hint, **facts)


@dataclass(eq=False)
class IndexValueError(QloadError, ValueError):
    """An index tensor has a value out of range.

    Raised when a layer is loaded or a typed weight is constructed: kernels use such a tensor unchecked.

    Attributes
    ----------
    tensor, value, at, count
        Full name of the index tensor, the first wrong value, its position, and the number of wrong values.
    limit, also
        Values must be at least 0 and less than `limit`; another condition as text, or "".
    file
        File of the tensor, or None.
    """

    rule: ClassVar[str] = "index-range"

    tensor: str
    value: int
    at: int
    limit: int
    count: int
    file: str | None = None
    also: str = ""

    def __str__(self) -> str:
        also = f", {self.also}" if self.also else ""
        count = f" ({self.count} in all)" if self.count > 1 else ""
        expected, got = f"0 <= index < {self.limit}{also}", f"{self.value} at {self.at}{count}"
        facts = {"expected": expected, "got": got, "in": self.file or None}
        return format_error(f"{self.tensor}: index out of range", **facts)


@dataclass(eq=False)
class MismatchError(QloadError, ValueError):
    """Two sources of a fact disagree.

    Raised for tensors of a layer that contradict each other or the config, for different parts of a fused
    layer, and for values without a meaning, such as NaN for a quantizer.

    Attributes
    ----------
    tensor, what
        The tensors or layers, and the fault as text.
    expected, got, hint
        The fact from the one source and from the other; another line of text, or "".
    """

    rule: ClassVar[str] = "mismatch"

    tensor: str
    what: str
    expected: str
    got: str
    hint: str = ""

    def __str__(self) -> str:
        title = f"{self.tensor}: {self.what}"
        return format_error(title, self.hint, expected=self.expected, got=self.got)


@dataclass(eq=False)
class AmbiguousIndexError(MismatchError):
    """An index has two meanings among its readers: a `g_idx` of zeros with several groups.

    Raised when such a layer is loaded. The fields are those of MismatchError.
    """

    rule: ClassVar[str] = "index-ambiguous"


@dataclass(eq=False)
class FieldValueError(MismatchError):
    """A packed field has a value outside of its declaration, such as wrong 2:4 metadata.

    Raised when a typed weight is constructed. The fields are those of MismatchError.
    """

    rule: ClassVar[str] = "field-value"


@dataclass(eq=False)
class NonfiniteScaleError(MismatchError):
    """A scale of a layer is NaN or infinite.

    Raised when the layer is loaded, unless `nonfinite="allow"`. The fields are those of MismatchError.
    """

    rule: ClassVar[str] = "scale-value"


@dataclass(eq=False)
class ExcludedModuleError(MismatchError):
    """A layer is excluded from quantization by the config, but its tensors are quantized.

    Raised when the layer is loaded. The fields are those of MismatchError.
    """

    rule: ClassVar[str] = "excluded-module"


@dataclass(eq=False)
class TwoFormatsError(MismatchError):
    """The tensors of a layer belong to two formats.

    Raised when the layer is loaded. The fields are those of MismatchError.
    """

    rule: ClassVar[str] = "two-formats"


@dataclass(eq=False)
class StorageError(QloadError, ValueError):
    """A file is not a valid checkpoint, or its storage is closed.

    Raised by `SafetensorsStorage`, and so by `open_checkpoint`.

    Attributes
    ----------
    file
        The file or directory.
    rule
        Stable id in reports of `verify`: here a field of the error, not of its class.
    detail, remedy
        The fault and a remedy as text, or "".
    tensor
        Name of the faulty tensor, or None.
    """

    file: str
    rule: str = field()  # type: ignore[misc]
    detail: str
    tensor: str | None = None
    remedy: str = ""

    def __str__(self) -> str:
        place = f"{self.file}: {self.tensor}" if self.tensor else self.file
        return format_error(f"{place}: {self.detail}", remedy=self.remedy or None)


@dataclass(eq=False)
class HubUnreachableError(StorageError):
    """The hub does not answer, or HF_HUB_OFFLINE forbids requests: only the local cache is left.

    Raised by `qload.hub`. The fields are those of StorageError.
    """


@dataclass(eq=False)
class ConfigError(QloadError, ValueError):
    """A config file has a missing or malformed value.

    Raised by `open_checkpoint` and `loader_from_config`: a malformed value is never replaced by a default.

    Attributes
    ----------
    file, key
        The file, and the dotted path of the key.
    expected, got, hint
        The allowed values and the value as text; another line of text, or "".
    """

    rule: ClassVar[str] = "config"

    file: str
    key: str
    expected: str
    got: str
    hint: str = ""

    def __str__(self) -> str:
        title = f"{self.file}: {self.key}"
        return format_error(title, self.hint, expected=self.expected, got=self.got)


@dataclass(eq=False)
class ConfigsDisagreeError(ConfigError):
    """Two config files of a checkpoint disagree about its layers."""

    rule: ClassVar[str] = "config-side-file"


@dataclass(eq=False)
class UnsupportedFormatError(QloadError, NotImplementedError):
    """A checkpoint or a layer has a format without a reader.

    Raised by `open_checkpoint` and `loader_from_config`, and when a layer of such a format is loaded.

    Attributes
    ----------
    format, reason
        Name of the format, and the reason as text.
    known
        Names of the supported formats, or ().
    remedy
        A program with a reader, or "".
    """

    rule: ClassVar[str] = "unsupported-format"

    format: str
    reason: str
    known: Sequence[str] = ()
    remedy: str = ""

    def __str__(self) -> str:
        return format_error(
            f"{self.format}: not read by this qload",
            reason=self.reason,
            known=", ".join(self.known) or None,
            remedy=self.remedy or None,
        )


@dataclass(eq=False)
class UnreadTensorsError(QloadError, NotImplementedError):
    """No format reads some tensors of a checkpoint.

    Raised before any weight is read when a whole checkpoint is loaded, run, converted or sharded: an unread
    tensor is neither used nor copied.

    Attributes
    ----------
    unread
        Name of a tensor -> reason and remedy.
    nbytes
        Bytes of all these tensors.
    """

    rule: ClassVar[str] = "unread-tensor"

    unread: Mapping[str, str]
    nbytes: int = 0

    def __str__(self) -> str:
        names, reasons = list(self.unread), list(dict.fromkeys(self.unread.values()))
        others = f" (and {len(reasons) - 1} other reasons)" if reasons[1:] else ""
        return format_error(
            f"{names[0]}: not read by any format",
            tensors=f"{list_names(names)}; {self.nbytes} bytes in all",
            reason=f"{reasons[0]}{others}",
        )


@dataclass(eq=False)
class LostRankError(QloadError, RuntimeError):
    """A process of a world ended early, or never connected.

    Raised by `joined_world` in all remaining processes.

    Attributes
    ----------
    rank
        The lost rank; None if it is unknown.
    world
        Number of ranks in the world.
    reason
        The reason as text.
    """

    rule: ClassVar[str] = "world"

    rank: int | None
    world: int
    reason: str

    def __str__(self) -> str:
        rank = "a rank" if self.rank is None else f"rank {self.rank}"
        return format_error(f"{rank} of {self.world} is lost", reason=self.reason)


@contextmanager
def written_to(place: Path) -> Iterator[None]:
    """Add `place` to an OSError without a file name inside the block, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(place)
        raise
