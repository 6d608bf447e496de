"""A tensor's declaration, and the sizes of a layer that its tensors' shapes agree on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor

from qload.errors import DtypeError, IndexValueError, ShapeError, check_values
from qload.spec.axis import PARTS, Axis, axes_of

Shape = tuple[int, ...]
EXPONENTS = frozenset((torch.uint8, torch.float8_e8m0fnu))


class Role(Enum):
    """What a tensor is for. Only plain floats are ever cast to the dtype a user asks for.

    `UNUSED`: nothing; it is known why it is stored, and what its values are says nothing.
    """

    FLOAT = "float"  # plain weights, biases, norms
    WORD = "word"  # packed codes or zero points
    INDEX = "index"
    SCALE = "scale"
    UNUSED = "unused"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer, as its format declares it.

    Attributes
    ----------
    name
        The field's name.
    dtypes
        Those allowed.
    text
        Its axes, such as `"K*4/32 N"`; `qload.spec.axis` has the grammar.
    role
        What it is for, which says whether it may be cast.
    stored
        The on-disk suffix where it differs from the field's name; several where tools differ.
    fact
        Small, read whole by every rank before anything is decided.
    index_of
        Its values point into that free axis; the loader checks and rebases them.
    permutation
        It names each of its own places once.
    nibbles
        The only values its four-bit fields may have.
    between
        The least and the greatest value that a writer ever stores.
    divides
        Something is divided by its values: none may be zero.
    holds
        The values that it always has, entry by entry: kernels know them and never look.
    view
        The axes to cut and join along, where the stored shape hides them.
    spent
        Used up by the format's `resolve`: the typed weight does not hold it.
    optional
        May be absent.
    reason
        Why it may not, where it may elsewhere, and what to do if it is.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
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
    holds: tuple[float, ...] = ()
    view: str | None = None
    spent: bool = False
    reason: str = ""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The declared axes, outermost first."""
        return axes_of(self.text)

    @property
    def places(self) -> tuple[Axis, ...]:
        """The axes to cut and join along: those of the view, or the declared ones."""
        return axes_of(self.text if self.view is None else self.view)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What may follow the layer's prefix on disk."""
        return (self.stored,) if isinstance(self.stored, str) else self.stored or (self.name,)

    @property
    def suffix(self) -> str:
        """What follows the layer's prefix on disk, the first of several names."""
        return self.suffixes[0]

    @property
    def is_exponents(self) -> bool:
        """Whether its values are exponents alone (E8M0): those are the floats that may be stored as bytes."""
        return torch.uint8 in self.dtypes and EXPONENTS.issuperset(self.dtypes)

    def joined(self) -> int | None:
        """The place along which the parts of a fused layer are joined, or None."""
        return next((i for i, axis in enumerate(self.places) if axis.follows("N") or axis.dim == PARTS), None)


def named(prefix: str, suffix: str) -> str:
    """`layers.0.q_proj`, `qweight` -> `layers.0.q_proj.qweight`; without a prefix, the suffix.

    A suffix that begins with `_` goes on from the prefix: `experts.down_proj`, `_blocks`.
    """
    return f"{prefix}{'' if suffix.startswith('_') else '.'}{suffix}" if prefix else suffix


def check_dtypes(specs: Iterable[TensorSpec], seen: Mapping[str, torch.dtype], names: "Names") -> None:
    """Every tensor has one of its declared dtypes, or DtypeError."""
    for spec in specs:
        if spec.name in seen and seen[spec.name] not in spec.dtypes:
            allowed = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
            got = str(seen[spec.name]).removeprefix("torch.")
            raise DtypeError(names.full(spec.name), allowed, got, names.file(spec.name))


def solve(
    specs: Iterable[TensorSpec],
    shapes: Mapping[str, Shape],
    names: "Names",
    known: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """The size of each dimension, from shapes that all agree with their declarations, or ShapeError.

    Axes that say a dimension as it is are believed first, so that the tensor which contradicts them
    is the one named. An axis `"K/128^|G"` only tells G: whether it fits K is for the format to judge. What
    no shape tells is taken from `known`.
    """
    there = tuple(spec for spec in specs if spec.name in shapes)
    for spec in there:
        if len(spec.axes) != len(shapes[spec.name]):
            raise ShapeError(
                names.full(spec.name),
                f"{len(spec.axes)} axes: ({_formula(spec)})",
                shapes[spec.name],
                names.file(spec.name),
            )
    texts = tuple((spec.text, shapes[spec.name]) for spec in there)
    sizes, wrong = _solve_cached(texts, tuple((known or {}).items()))
    if wrong is not None:
        raise _contradiction(there[wrong], dict(sizes), texts[wrong][1], names)
    return dict(sizes)


@lru_cache(1 << 12)
def _solve_cached(
    texts: tuple[tuple[str, Shape], ...], known: tuple[tuple[str, int], ...]
) -> tuple[tuple[tuple[str, int], ...], int | None]:
    """The sizes that declarations and shapes tell, and the first place where one contradicts these.

    A model has thousands of layers of a few shapes; each is solved once.
    """
    sizes: dict[str, int] = {}
    axes = [pair for text, shape in texts for pair in zip(axes_of(text), shape, strict=True)]
    for axis, stored in sorted(axes, key=lambda pair: len(pair[0].ops)):
        dim = axis.free or axis.dim
        tells = not axis.flat and not (axis.rounds and not axis.free)
        if dim.isalpha() and dim not in sizes and tells:
            sizes[dim] = stored if axis.free else int(stored / axis.factor)
    for dim, size in known:
        sizes.setdefault(dim, size)
    agree = [tuple(_stored_size(axis, sizes) for axis in axes_of(text)) == shape for text, shape in texts]
    return tuple(sizes.items()), None if all(agree) else agree.index(False)


class Names:
    """How a layer's fields are called in messages: in full, and in which file."""

    def full(self, field: str) -> str:
        """`qweight` -> `layers.0.q_proj.qweight`."""
        return field

    def file(self, field: str) -> str | None:
        """The file that holds it, or None."""
        return None


def _contradiction(spec: TensorSpec, sizes: Mapping[str, int], shape: Shape, names: Names) -> ShapeError:
    expected = [_stored_size(axis, sizes) for axis in spec.axes]
    values = ", ".join("?" if want is None else str(want) for want in expected)
    inexact = [axis for axis, want in zip(spec.axes, expected, strict=True) if want is None]
    hint = "; ".join(
        f"{axis.dim} = {axis.logical(sizes)} has to be a multiple of {axis.granule}" for axis in inexact
    )
    return ShapeError(
        names.full(spec.name), f"({values}) = ({_formula(spec)})", shape, names.file(spec.name), hint
    )


def _stored_size(axis: Axis, sizes: Mapping[str, int]) -> int | None:
    if axis.free:
        return sizes[axis.free]
    logical = axis.logical(sizes)
    return None if logical is None else axis.size(logical)


def _formula(spec: TensorSpec) -> str:
    return ", ".join(axis.free or axis.text for axis in spec.axes)


def check_index(spec: TensorSpec, index: Tensor, sizes: Mapping[str, int], names: Names) -> None:
    """Every value of an index tensor lies in the free axis it points into, or IndexValueError."""
    check_values(names.full(spec.name), index)
    limit = sizes[spec.index_of or ""]
    wrong = ((index < 0) | (index >= limit)).nonzero()
    if wrong.numel():
        at = int(wrong[0, 0])
        raise IndexValueError(
            names.full(spec.name), int(index[at]), at, limit, wrong.shape[0], names.file(spec.name)
        )


def check_permutation(spec: TensorSpec, index: Tensor, names: Names) -> None:
    """An index tensor names every one of its places once, or IndexValueError."""
    check_values(names.full(spec.name), index)
    at, size = index.long(), index.numel()
    wrong = (at < 0) | (at >= size)
    taken = torch.bincount(at[~wrong], minlength=size)  # what lies outside has no place to be counted at
    wrong[~wrong] = taken[at[~wrong]] > 1
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        raise IndexValueError(
            names.full(spec.name),
            int(at[first]),
            first,
            size,
            int(wrong.sum()),
            names.file(spec.name),
            "each once",
        )
