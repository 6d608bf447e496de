"""Every exception of qload: facts as fields, and text made of them when it is printed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar


class QloadError(Exception):
    """Base of every error qload raises on purpose: its facts are fields, its text is made on print.

    Catching it catches all of them, and nothing else. Each is also the built-in error of its sort, such as
    ValueError or KeyError. `rule` is the stable id under which `verify` reports it. Errors can be pickled, so
    that one rank can hand them to another.
    """

    rule: ClassVar[str] = "error"

    def __reduce__(self) -> tuple[Any, ...]:
        if not hasattr(self, "__dataclass_fields__"):
            return type(self), self.args
        return type(self), tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]


def join_lines(first: str, *rest: object) -> str:
    """The first line, and under it, indented, those of the rest that say something."""
    return "\n  ".join([first, *(str(line) for line in rest if line)])


@dataclass(eq=False)
class CutError(QloadError, ValueError):
    """A cut falls inside of something that has to stay whole.

    Raised by loads of a rank's share (`get_weights_col`, `get_weights_row` and the like), before anything is
    read, and by every rank alike; and by `create_weights` of a quantization method.

    Attributes
    ----------
    tensor
        The full name of the tensor that cannot be cut.
    dim, size, cut
        The dimension, "N" or "K", how long it is, and where it was to be cut.
    block
        Cuts are lawful at multiples of this; 0 where the dimension is never cut.
    why
        The axis that binds, as its format declares it.
    world, lawful
        How many ranks there are, and how many would do; None and () where it is not about ranks.
    """

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
        above = min(below + self.block, self.size)  # the end of a dimension is as good as a multiple
        near = sorted({below, above} - {self.cut}) if self.block else []
        return join_lines(
            f"{self.tensor}: cannot cut {self.dim} = {self.size} at {self.cut}{ranks}",
            f"cuts must be multiples of {self.block}   {self.why}"
            if self.block
            else f"never cut   {self.why}",
            near and f"nearest  {' or '.join(map(str, near))}",
            self.world and f"lawful   {worlds(self.lawful)}",
        )


@dataclass(eq=False)
class DivideError(QloadError, ValueError):
    """A dimension does not divide into the parts asked for.

    Raised by loads of a rank's share, and by the tensor-parallel layers of `qload.methods`.

    Attributes
    ----------
    tensor
        The tensor or layer.
    dim, size
        Its dimension, by number or by name, and how long that is.
    parts
        What it was to be divided into, such as "4 ranks".
    hint
        A further line for the reader, or "".
    """

    rule: ClassVar[str] = "tensor-parallel"

    tensor: str
    dim: int | str
    size: int
    parts: str  # "4 ranks", "3 blocks", "blocks of 1 + 2"
    hint: str = ""

    def __str__(self) -> str:
        dim = f"dimension {self.dim}" if isinstance(self.dim, int) else self.dim
        return join_lines(f"{self.tensor}: {dim} = {self.size} does not divide into {self.parts}", self.hint)


@dataclass(eq=False)
class CastError(QloadError, OverflowError):
    """A cast would turn finite values into infinities, or small ones into 0 or fewer bits.

    Raised where tensors are cast while they are loaded (`Weights` with a dtype), repacked (scales of FP8 for
    Marlin's kernel), quantized, or prepared for a kernel.

    Attributes
    ----------
    tensor
        The tensor that holds the value.
    source, target
        The two dtypes, by name.
    value, count
        The first value that would be lost, and how many would.
    remedy
        What to do instead.
    """

    rule: ClassVar[str] = "cast"

    tensor: str
    source: str
    target: str
    value: float
    count: int
    remedy: str = "load with dtype=None, which keeps what is stored, or with a wider dtype"

    def __str__(self) -> str:
        way = "underflows" if abs(self.value) < 1 else "overflows"
        return join_lines(
            f"{self.tensor}: a cast from {self.source} to {self.target} {way}",
            f"got      {self.value:g}" + (f" ({self.count} values in all)" if self.count > 1 else ""),
            f"remedy   {self.remedy}",
        )


@dataclass(eq=False)
class RepackError(QloadError, ValueError):
    """A weight cannot be said in another layout.

    Raised by `repack` and by loaders that repack; never by a layout that can say the weight exactly.

    Attributes
    ----------
    source
        The weight's own format, behind the layer's name where there is one.
    layout
        The layout asked for.
    reason
        Why it cannot, in words.
    """

    rule: ClassVar[str] = "repack"

    source: str
    layout: str
    reason: str

    def __str__(self) -> str:
        return join_lines(f"{self.source} to {self.layout}: cannot repack", f"reason   {self.reason}")


@dataclass(eq=False)
class KernelRefusedError(QloadError, ValueError, NotImplementedError):
    """A kernel was made for a layer that it had said no to.

    Raised by the constructors of `MPLinearKernel`s.

    Attributes
    ----------
    kernel
        The kernel's class, by name.
    reason
        What `can_implement` said, in words.
    """

    rule: ClassVar[str] = "kernel"

    kernel: str
    reason: str

    def __str__(self) -> str:
        return join_lines(f"{self.kernel}: cannot run this layer", f"reason   {self.reason}")


@dataclass(eq=False)
class NoKernelError(QloadError, ValueError):
    """Every kernel said no.

    Raised by `choose_mp_linear_kernel`.

    Attributes
    ----------
    layer
        The layer in words: its type of codes and its shape.
    reasons
        Why not, by kernel.
    """

    rule: ClassVar[str] = "kernel"

    layer: str
    reasons: Mapping[str, str]  # by kernel

    def __str__(self) -> str:
        width = max(map(len, self.reasons), default=0)
        said = (f"{kernel:{width}}  {reason}" for kernel, reason in self.reasons.items())
        return join_lines(f"{self.layer}: no kernel", *said)


@dataclass(eq=False)
class NotEnoughMemoryError(QloadError, MemoryError):
    """A device has less memory than what is asked of it needs at least.

    Raised before any of it is taken, by `qload run` and `qload verify --logits`.

    Attributes
    ----------
    device
        The device, by name.
    needed, free
        Bytes that are needed, and those that the device has to give.
    """

    rule: ClassVar[str] = "memory"

    device: str
    needed: int
    free: int

    def __str__(self) -> str:
        return join_lines(
            f"{self.device}: too little memory", f"needed {self.needed} bytes", f"free   {self.free} bytes"
        )


@dataclass(eq=False)
class NotWarmError(QloadError, RuntimeError):
    """A layer was called before it had its scratch space.

    Raised by the ExLlama kernel's layers; `warm_up` gives them theirs.

    Attributes
    ----------
    tensor
        The weight that needs the space.
    device
        Where it was called, by name.
    """

    rule: ClassVar[str] = "warm-up"

    tensor: str
    device: str

    def __str__(self) -> str:
        return join_lines(
            f"{self.tensor}: no scratch space on {self.device}",
            "remedy   call qload.warm_up(model, max_input_len) once the weights are processed",
        )


@dataclass(eq=False)
class PatternError(QloadError, ValueError):
    """A layout's sentence is not a permutation, or does not fit a tensor.

    Raised by `Order`, `Packing` and the axes of a declaration.

    Attributes
    ----------
    pattern
        The sentence.
    detail
        What is wrong with it.
    """

    rule: ClassVar[str] = "pattern"

    pattern: str
    detail: str

    def __str__(self) -> str:
        return join_lines(f"{self.pattern!r}: {self.detail}")


@dataclass(eq=False)
class ArgumentError(QloadError, ValueError):
    """A caller's argument is not one qload can act on.

    Raised wherever an argument can be judged by itself.

    Attributes
    ----------
    argument
        Which one, by name.
    expected, got
        What it may be, and what it is.
    """

    rule: ClassVar[str] = "argument"

    argument: str
    expected: str
    got: str

    def __str__(self) -> str:
        return join_lines(f"{self.argument}", f"expected {self.expected}", f"got      {self.got}")


@dataclass(eq=False)
class UnknownMethodError(QloadError, KeyError):
    """No quantization method is registered under a name.

    Raised by `qload.methods.get_quantization_config`.

    Attributes
    ----------
    name
        The name asked for.
    known
        The names there are.
    """

    rule: ClassVar[str] = "unknown-method"

    name: str
    known: Sequence[str]

    def __str__(self) -> str:
        return join_lines(
            f"{self.name!r}: no such quantization method", f"known    {', '.join(self.known) or 'none'}"
        )


def worlds(lawful: Sequence[int]) -> str:
    """World sizes, as an error offers them."""
    return "world sizes " + ", ".join(map(str, lawful)) if lawful else "none but the whole"


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
        return join_lines(
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
        return join_lines(
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
        return join_lines(
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
        return join_lines(
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
        return join_lines(
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
        return join_lines(where + self.detail, self.remedy and f"remedy   {self.remedy}")


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
        return join_lines(
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
        return join_lines(
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
        return join_lines(
            f"{names[0]}: not read by any format",
            f"tensors  {', '.join(names[:shown])}{more}; {self.nbytes} bytes in all",
            f"reason   {reasons[0]}{other}",
        )


@dataclass(eq=False)
class LostRankError(QloadError, RuntimeError):
    """A process of a world is gone, or never came, so that the others cannot go on.

    Raised by `joined_world` in every process that is left.

    Attributes
    ----------
    rank
        Which one; None: it is not known which.
    world
        How many there were to be.
    reason
        What is known of its end, in words.
    """

    rule: ClassVar[str] = "world"

    rank: int | None
    world: int
    reason: str

    def __str__(self) -> str:
        who = "a rank" if self.rank is None else f"rank {self.rank}"
        return join_lines(f"{who} of {self.world} is lost", f"reason   {self.reason}")


@contextmanager
def written_to(place: Path) -> Iterator[None]:
    """Inside, an OSError names `place`, if it names no file: that of a write has none, as a full disk's."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(place)
        raise
