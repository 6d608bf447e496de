"""What a caller asks for cannot be done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from qload.errors.base import QloadError, lines


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
        return lines(
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
        return lines(f"{self.tensor}: {dim} = {self.size} does not divide into {self.parts}", self.hint)


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
        return lines(
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
        return lines(f"{self.source} to {self.layout}: cannot repack", f"reason   {self.reason}")


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
        return lines(f"{self.kernel}: cannot run this layer", f"reason   {self.reason}")


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
        return lines(f"{self.layer}: no kernel", *said)


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
        return lines(
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
        return lines(
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
        return lines(f"{self.pattern!r}: {self.detail}")


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
        return lines(f"{self.argument}", f"expected {self.expected}", f"got      {self.got}")


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
        return lines(
            f"{self.name!r}: no such quantization method", f"known    {', '.join(self.known) or 'none'}"
        )


def worlds(lawful: Sequence[int]) -> str:
    """World sizes, as an error offers them."""
    return "world sizes " + ", ".join(map(str, lawful)) if lawful else "none but the whole"
