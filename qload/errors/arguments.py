"""What a caller asks for cannot be done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from qload.errors.base import QloadError, lines


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
    """A dimension does not divide into the parts asked for."""

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
    """A cast would turn finite values into infinities, or small ones into 0 or fewer bits."""

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
    """A weight cannot be said in another layout."""

    rule: ClassVar[str] = "repack"

    source: str
    layout: str
    reason: str

    def __str__(self) -> str:
        return lines(f"{self.source} to {self.layout}: cannot repack", f"reason   {self.reason}")


@dataclass(eq=False)
class KernelRefusedError(QloadError, ValueError, NotImplementedError):
    """A kernel was made for a layer that it had said no to."""

    rule: ClassVar[str] = "kernel"

    kernel: str
    reason: str

    def __str__(self) -> str:
        return lines(f"{self.kernel}: cannot run this layer", f"reason   {self.reason}")


@dataclass(eq=False)
class NoKernelError(QloadError, ValueError):
    """Every kernel said no."""

    rule: ClassVar[str] = "kernel"

    layer: str
    reasons: Mapping[str, str]  # by kernel

    def __str__(self) -> str:
        width = max(map(len, self.reasons), default=0)
        said = (f"{kernel:{width}}  {reason}" for kernel, reason in self.reasons.items())
        return lines(f"{self.layer}: no kernel", *said)


@dataclass(eq=False)
class NotWarmError(QloadError, RuntimeError):
    """A layer was called before it had its scratch space."""

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
    """A layout's sentence is not a permutation, or does not fit a tensor."""

    rule: ClassVar[str] = "pattern"

    pattern: str
    detail: str

    def __str__(self) -> str:
        return lines(f"{self.pattern!r}: {self.detail}")


@dataclass(eq=False)
class ArgumentError(QloadError, ValueError):
    """A caller's argument is not one qload can act on."""

    rule: ClassVar[str] = "argument"

    argument: str
    expected: str
    got: str

    def __str__(self) -> str:
        return lines(f"{self.argument}", f"expected {self.expected}", f"got      {self.got}")


@dataclass(eq=False)
class UnknownMethodError(QloadError, KeyError):
    """No quantization method is registered under a name."""

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
