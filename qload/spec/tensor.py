"""`TensorSpec`: declaration of a layer's tensor; checks of dtypes, shapes and indices against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qload import dtypes
from qload.dtypes import Dtype
from qload.errors import DtypeError, IndexValueError, ShapeError, check_values
from qload.lazy_torch import Tensor
from qload.spec.axis import PARTS, Axis, axes_of

Shape = tuple[int, ...]
Fact: TypeAlias = "Tensor | NDArray[Any]"  # an array where torch is not imported
EXPONENTS = frozenset((dtypes.uint8, dtypes.float8_e8m0fnu))


class Role(Enum):
    """Role of a tensor. Only plain floats (FLOAT) are cast to the dtype of the user.

    `UNUSED`: stored for a known reason, with values of no effect.
    """

    FLOAT = "float"  # plain weights, biases, norms
    WORD = "word"  # packed codes or zero points
    INDEX = "index"
    SCALE = "scale"
    UNUSED = "unused"


@dataclass(frozen=True)
class ScaleBytes:
    """Scales in bytes `start` to `stop` of the last axis of packed codes; `read` decodes these bytes."""

    start: int
    stop: int
    read: Callable[[Tensor], Tensor] = field(repr=False)

    @property
    def slice(self) -> slice:
        """Slice of the last axis."""
        return slice(self.start, self.stop)

    def of(self, tensor: Tensor) -> Tensor:
        """Decode the scales of a tensor: all bytes of its last axis, or those of the scales alone."""
        alone = tensor.shape[-1] == self.stop - self.start
        return self.read(tensor if alone else tensor[..., self.slice])


class Packing(Protocol):
    """Packing of codes that the axes of a stored tensor do not show; it can be pickled and compared."""

    def stored_shape(self, shape: Sequence[int]) -> Sequence[int]:
        """Shape of the stored tensor for codes of a `shape`."""

    def unpack(self, stored: Tensor, shape: Sequence[int]) -> Tensor:
        """Unpack a stored tensor to codes of a `shape`."""

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes; the inverse of `unpack`."""


@dataclass(frozen=True)
class TensorSpec:
    """Declaration of a layer's tensor by its format.

    Attributes
    ----------
    name
        Field of the typed weight.
    dtypes
        Allowed dtypes.
    text
        Axes, such as `"K*4/32 N"`; see `qload.spec.axis` for the grammar.
    role
        Role of the tensor; only FLOAT is cast.
    stored
        Suffix on disk, if different from the field; several suffixes of different tools.
    fact
        True for a small tensor that every rank reads whole before any weight.
    index_of
        Free axis of the tensor's indices; the loader checks them and subtracts the offset of a share.
    permutation
        True for a permutation of its own positions.
    nibbles
        Allowed values of its four-bit fields.
    between
        Least and greatest value of any writer.
    divides
        True for divisors, which may not be zero.
    signed
        True for scales and offsets of either sign.
    holds
        Constant values, entry by entry; kernels do not read them.
    view
        Axes of cuts and joins, if the stored shape hides them.
    packing
        Packing of the codes of the view, if it is no reshape; a share is packed anew.
    spent
        True for a tensor that `resolve` consumes: it is not part of the typed weight.
    optional
        True for a tensor that may be missing.
    scale_bytes
        Scales within the tensor, which may not be NaN or infinite.
    decisive
        True for codes with scales among their bytes that kernels may be unable to represent.
    reason
        Reason for a required tensor that is optional in other configs, with a remedy.
    """

    name: str
    dtypes: tuple[Dtype, ...]
    text: str
    role: Role
    stored: str | tuple[str, ...] | None = None
    fact: bool = False
    index_of: str | None = None
    optional: bool = False
    permutation: bool = False
    nibbles: tuple[int, ...] = ()
    between: tuple[int, int] | None = None
    divides: bool = False
    signed: bool = False
    holds: tuple[float, ...] = ()
    view: str | None = None
    packing: Packing | None = None
    spent: bool = False
    scale_bytes: ScaleBytes | None = None
    decisive: bool = field(default=False, repr=False)
    reason: str = ""

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """Declared axes, outermost first."""
        return axes_of(self.text)

    @cached_property
    def places(self) -> tuple[Axis, ...]:
        """Axes of cuts and joins: the axes of the view, else the declared ones."""
        return axes_of(self.text if self.view is None else self.view)

    @property
    def binding(self) -> tuple[Axis, ...]:
        """Axes that bind cuts: a share is stored as declared, and cut by the axes of its view."""
        return self.axes if self.view is None else tuple(dict.fromkeys((*self.axes, *self.places)))

    @cached_property
    def suffixes(self) -> tuple[str, ...]:
        """Possible suffixes after the layer's prefix on disk."""
        return (self.stored,) if isinstance(self.stored, str) else self.stored or (self.name,)

    @property
    def suffix(self) -> str:
        """First suffix after the layer's prefix on disk."""
        return self.suffixes[0]

    @property
    def has_scales(self) -> bool:
        """True for scales, and for codes with scales among their bytes."""
        return self.role is Role.SCALE or self.scale_bytes is not None

    @property
    def is_exponents(self) -> bool:
        """True if the values are exponents (E8M0), the only floats that may be stored as bytes."""
        return dtypes.uint8 in self.dtypes and EXPONENTS.issuperset(self.dtypes)

    @property
    def is_per_part(self) -> bool:
        """True for a single value, or one of each fused part: stored as () or (1,), kept as (parts,)."""
        return [axis.dim for axis in self.axes] == [PARTS]

    def to_view(self, stored: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """Reshape or unpack a `stored` tensor to the axes of its view, for a layer or share of `sizes`."""
        shape = [axis.size(axis.logical(sizes) or 0) or 0 for axis in self.places]
        return stored.reshape(shape) if self.packing is None else self.packing.unpack(stored, shape)

    def from_view(self, viewed: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """Reshape or pack a `viewed` tensor of `sizes` to the stored axes; the inverse of `to_view`."""
        if self.packing is not None:
            return self.packing.pack(viewed)
        return viewed.reshape([axis.size(axis.logical(sizes) or 0) or 0 for axis in self.axes])

    def joined(self) -> int | None:
        """Axis number of the join of a fused layer's parts; None without one."""
        return next((i for i, axis in enumerate(self.places) if axis.follows("N") or axis.dim == PARTS), None)


def named(prefix: str, suffix: str) -> str:
    """Join prefix and suffix of a tensor name: `layers.0.q_proj`, `qweight` -> `layers.0.q_proj.qweight`.

    A suffix such as `_blocks` is appended without a dot: see `is_appended`.
    """
    return prefix + suffix if not prefix or is_appended(suffix) else f"{prefix}.{suffix}"


def is_appended(suffix: str) -> bool:
    """Return whether a suffix follows its prefix without a dot: `experts.down_proj`, `_blocks`.

    torchao's suffixes, such as `_weight_qdata`, follow a dot.
    """
    return suffix[:1] == "_" and not suffix.startswith("_weight_")


def check_dtypes(specs: Iterable[TensorSpec], dtypes: Mapping[str, Dtype], names: Names) -> None:
    """Raise DtypeError for a tensor without a declared dtype."""
    for spec in specs:
        if spec.name in dtypes and dtypes[spec.name] not in spec.dtypes:
            allowed = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
            got = str(dtypes[spec.name]).removeprefix("torch.")
            raise DtypeError(names.full(spec.name), allowed, got, names.file(spec.name))


def solve(
    specs: Iterable[TensorSpec],
    shapes: Mapping[str, Shape],
    names: Names,
    known: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Solve the size of each dimension from the shapes of all tensors; ShapeError for a contradiction.

    Axes without operations take precedence, so that the error names the contradicting tensor. An axis
    `"K/128^|G"` determines G alone; the format checks it against K. Sizes in no shape are taken from `known`.
    """
    stored = tuple(spec for spec in specs if spec.name in shapes)
    texts = tuple((spec.text, shapes[spec.name]) for spec in stored)
    sizes, wrong = _solve_cached(texts, tuple((known or {}).items()))
    if wrong is not None:
        raise _contradiction(stored[wrong], dict(sizes), texts[wrong][1], names)
    return dict(sizes)


@lru_cache(1 << 12)
def _solve_cached(
    texts: tuple[tuple[str, Shape], ...], known: tuple[tuple[str, int], ...]
) -> tuple[tuple[tuple[str, int], ...], int | None]:
    """Solve the sizes: (sizes, number of the first contradicting tensor or None).

    Cached, as a model has thousands of layers of a few shapes.
    """
    sizes: dict[str, int] = {}
    for number, (text, shape) in enumerate(texts):
        if len(axes_of(text)) != len(shape):
            return (), number
    axes = [pair for text, shape in texts for pair in zip(axes_of(text), shape, strict=True)]
    for axis, stored in sorted(axes, key=lambda pair: len(pair[0].ops)):
        dim = axis.free or axis.dim
        is_exact = not axis.flat and (not axis.rounds or axis.free)
        if dim.isalpha() and dim not in sizes and is_exact:
            sizes[dim] = stored if axis.free else int(stored / axis.factor)
    for dim, size in known:
        sizes.setdefault(dim, size)
    agree = [tuple(_stored_size(axis, sizes) for axis in axes_of(text)) == shape for text, shape in texts]
    return tuple(sizes.items()), None if all(agree) else agree.index(False)


class Names:
    """Names of a layer's fields in messages: full name, and file."""

    def full(self, field: str) -> str:
        """`qweight` -> `layers.0.q_proj.qweight`."""
        return field

    def file(self, field: str) -> str | None:
        """File of the tensor; None without one."""
        return None


def _contradiction(spec: TensorSpec, sizes: Mapping[str, int], shape: Shape, names: Names) -> ShapeError:
    name, file = names.full(spec.name), names.file(spec.name)
    if len(spec.axes) != len(shape):
        return ShapeError(name, f"{len(spec.axes)} axes: ({_formula(spec)})", shape, file)
    expected = [_stored_size(axis, sizes) for axis in spec.axes]
    values = ", ".join("?" if want is None else str(want) for want in expected)
    inexact = [axis for axis, want in zip(spec.axes, expected, strict=True) if want is None]
    hint = "; ".join(
        f"{axis.dim} = {axis.logical(sizes)} has to be a multiple of {axis.granule}" for axis in inexact
    )
    return ShapeError(name, f"({values}) = ({_formula(spec)})", shape, file, hint)


def _stored_size(axis: Axis, sizes: Mapping[str, int]) -> int | None:
    if axis.free:
        return sizes[axis.free]
    logical = axis.logical(sizes)
    return None if logical is None else axis.size(logical)


def _formula(spec: TensorSpec) -> str:
    return ", ".join(axis.free or axis.text for axis in spec.axes)


def array_of(argument: str, fact: Fact) -> NDArray[Any]:
    """Values of a fact on the CPU; ArgumentError, which names the argument, for a tensor on device meta."""
    if isinstance(fact, np.ndarray):
        return fact
    if fact.is_meta:
        check_values(argument, fact)
    values: NDArray[Any] = fact.detach().cpu().numpy()
    return values


def check_index(spec: TensorSpec, fact: Fact, sizes: Mapping[str, int], names: Names) -> None:
    """Raise IndexValueError for an index outside of the free axis `index_of`."""
    index, limit = array_of(names.full(spec.name), fact), sizes[spec.index_of or ""]
    wrong = np.flatnonzero((index < 0) | (index >= limit))
    if wrong.size:
        at = int(wrong[0])
        raise IndexValueError(
            names.full(spec.name), int(index[at]), at, limit, wrong.size, names.file(spec.name)
        )


def check_permutation(spec: TensorSpec, fact: Fact, names: Names) -> None:
    """Raise IndexValueError for an index tensor that is not a permutation."""
    check_positions(spec.name, array_of(names.full(spec.name), fact), names)


def check_positions(field: str, at: NDArray[Any], names: Names) -> None:
    """Raise IndexValueError unless the values of `field` are all positions, each once."""
    size = at.size
    wrong = (at < 0) | (at >= size)
    counts = np.bincount(at[~wrong], minlength=size)  # without indices outside of the axis
    wrong[~wrong] = counts[at[~wrong]] > 1
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        count, file = int(wrong.sum()), names.file(field)
        raise IndexValueError(names.full(field), int(at[first]), first, size, count, file, "each once")
