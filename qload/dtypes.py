"""Dtypes of stored tensors, known without torch.

`TORCH` maps each to torch's dtype, `STORED` torch's dtypes to these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

from qload.lazy_torch import torch


class Dtype:
    """Dtype of a stored tensor, with the name and text of torch's; unique, and compared by identity.

    Attributes
    ----------
    name
        Name in torch, such as "float16".
    itemsize
        Bytes of an element.
    is_floating_point, is_complex
        Kind of its numbers, as in torch.
    """

    __slots__ = ("is_complex", "is_floating_point", "itemsize", "name")

    def __init__(
        self, name: str, itemsize: int, *, is_floating_point: bool = False, is_complex: bool = False
    ) -> None:
        self.name: Final = name
        self.itemsize: Final = itemsize
        self.is_floating_point: Final = is_floating_point
        self.is_complex: Final = is_complex

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> tuple[Callable[[str], Dtype], tuple[str]]:
        return dtype_of, (self.name,)  # a copy is the same object


float64 = Dtype("float64", 8, is_floating_point=True)
float32 = Dtype("float32", 4, is_floating_point=True)
float16 = Dtype("float16", 2, is_floating_point=True)
bfloat16 = Dtype("bfloat16", 2, is_floating_point=True)
float8_e4m3fn = Dtype("float8_e4m3fn", 1, is_floating_point=True)
float8_e5m2 = Dtype("float8_e5m2", 1, is_floating_point=True)
float8_e8m0fnu = Dtype("float8_e8m0fnu", 1, is_floating_point=True)
float8_e4m3fnuz = Dtype("float8_e4m3fnuz", 1, is_floating_point=True)
float8_e5m2fnuz = Dtype("float8_e5m2fnuz", 1, is_floating_point=True)
complex64 = Dtype("complex64", 8, is_complex=True)
int64 = Dtype("int64", 8)
int32 = Dtype("int32", 4)
int16 = Dtype("int16", 2)
int8 = Dtype("int8", 1)
uint64 = Dtype("uint64", 8)
uint32 = Dtype("uint32", 4)
uint16 = Dtype("uint16", 2)
uint8 = Dtype("uint8", 1)
bool_ = Dtype("bool", 1)


@runtime_checkable
class DtypeLike(Protocol):
    """A `Dtype`, or a dtype of torch; `STORED` maps either to a `Dtype`."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""

    @property
    def is_floating_point(self) -> bool:
        """True for real floats."""

    @property
    def is_complex(self) -> bool:
        """True for complex numbers."""


BY_NAME: dict[str, Dtype] = {dtype.name: dtype for dtype in list(globals().values()) if type(dtype) is Dtype}


class _TorchDtypes(dict[DtypeLike, "torch.dtype"]):
    def __missing__(self, dtype: DtypeLike) -> torch.dtype:
        found: torch.dtype = getattr(torch, str(dtype).removeprefix("torch."))
        self[dtype] = found
        return found


class _StoredDtypes(dict[DtypeLike, Dtype]):
    def __missing__(self, dtype: DtypeLike) -> Dtype:
        name = str(dtype).removeprefix("torch.")
        kind = {"is_floating_point": dtype.is_floating_point, "is_complex": dtype.is_complex}
        found = self[dtype] = BY_NAME.get(name) or Dtype(name, dtype.itemsize, **kind)
        return found


TORCH = _TorchDtypes()
STORED = _StoredDtypes()


def dtype_of(name: str) -> Dtype:
    """Return the dtype with a name in torch."""
    return BY_NAME.get(name) or STORED[getattr(torch, name)]
