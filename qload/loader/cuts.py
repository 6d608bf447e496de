"""Where the world cuts a layer: every rank checks all the places, from declarations alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from qload.errors import CutError, DivideError, worlds
from qload.loader.base import Part, Split
from qload.loader.description import LayerDescription
from qload.parallel import ProcessGroup
from qload.spec import Axis, ShareBounds

VOCABULARIES = ("lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "word_embeddings")
REMEDY = "\n  remedy   get_partial_weights_col, whose last share may be short"
WORLDS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)  # world sizes that an error offers, where lawful


@dataclass(frozen=True)
class Share:
    """One rank's share of a part: where it lies, all the world's cuts of K, and which part of how many."""

    layer: LayerDescription
    bounds: ShareBounds
    k_places: tuple[int, ...]
    part: int = 0
    indices: dict[str, tuple[slice, ...]] = field(default_factory=dict, compare=False, repr=False)

    def index(self, axes: str, places: Sequence[Axis]) -> tuple[slice, ...]:
        """The slices of a tensor whose axes are written `axes`; none of one that stays whole."""
        found = self.indices.get(axes)
        if found is None:
            pieces = [self.piece(axis) for axis in places]
            whole = all(one is None for one in pieces)
            found = () if whole else tuple(slice(None) if one is None else slice(*one) for one in pieces)
            self.indices[axes] = found
        return found

    def piece(self, axis: Axis) -> tuple[int, int] | None:
        """[start, stop) of a stored axis, or None where it stays whole."""
        here, K = self.bounds, self.layer.K
        if axis.dim == "P" and self.layer.sizes["P"] > 1:
            return self.part, self.part + 1
        if axis.dim == "N":
            return axis.at(here.n0, here.N), axis.at(here.n1, here.N)
        if axis.flat:
            start = axis.at(here.n0 * K, here.N * K)
            return start, start + (axis.size((here.n1 - here.n0) * K) or 0)
        if axis.dim == "K" and len(self.k_places) > 2 and self._suits(axis):
            return axis.at(here.k0, K), axis.at(here.k1, K)
        return None

    def extent(self, axis: Axis) -> int:
        """How many entries of a stored axis along which parts are joined are here."""
        if axis.dim == "P":
            return 1
        if axis.flat:
            return self.bounds.extent(axis)
        start, stop = self.piece(axis) or (0, 0)
        return stop - start

    def _suits(self, axis: Axis) -> bool:
        return axis.free is None or all(_exact(axis, "K", place, self.layer.sizes) for place in self.k_places)


def share(
    layer: LayerDescription,
    part: Part,
    split: Split | None,
    group: ProcessGroup,
    *,
    joined: bool = False,
    number: int = 0,
) -> Share:
    """This rank's share of a part; CutError or DivideError, the same on every rank.

    `joined`: another part follows, so that the end of this one is a cut like any other. `number`: which
    part of its layer this is.
    """
    question = (
        part.start,
        part.stop,
        part.copies,
        part.short,
        split,
        group.size(),
        group.rank(),
        joined,
        number,
    )
    known: Share | None = layer.cuts.get(question)
    if known is None:
        known = layer.cuts[question] = _share(layer, part, split, group, joined, number)
    return Share(layer, known.bounds, known.k_places, known.part, known.indices)


def _share(
    layer: LayerDescription, part: Part, split: Split | None, group: ProcessGroup, joined: bool, number: int
) -> Share:
    world, rank = group.size(), group.rank()
    start, stop = part.start, layer.N if part.stop is None else part.stop
    _check(layer, "N", (start, stop), None, joined)
    n, k = (start, stop), (0, layer.K)
    k_places: tuple[int, ...] = k
    if split == "N" and world > 1:
        place = _short_places if part.short else _places
        places, at = place(layer, "N", start, stop, world // part.copies), rank // part.copies
        n = (places[at], places[at + 1])
    if split == "K" and world > 1:
        k_places = _places(layer, "K", 0, layer.K, world)
        k = (k_places[rank], k_places[rank + 1])
    return Share(layer, ShareBounds(*n, *k, layer.N, layer.K), k_places, number)


def _places(layer: LayerDescription, dim: str, start: int, stop: int, world: int) -> tuple[int, ...]:
    width = stop - start
    if width % world:
        raise DivideError(
            _binding(layer, dim)[0],
            dim,
            width,
            f"{world} ranks",
            f"lawful   {worlds(_lawful(layer, dim, start, stop))}"
            + REMEDY * (dim == "N" and layer.prefix.rpartition(".")[2] in VOCABULARIES),
        )
    places = tuple(start + width // world * i for i in range(world + 1))
    _check(layer, dim, places, (start, stop, world))
    return places


def _short_places(layer: LayerDescription, dim: str, start: int, stop: int, world: int) -> tuple[int, ...]:
    """Equal shares of as few granules as will do, the last one of what is left; DivideError for nothing."""
    block, width = granule(layer, dim), stop - start
    if not block:
        return _places(layer, dim, start, stop, world)

    def share(ranks: int) -> int:
        return -(-width // (ranks * block)) * block

    if share(world) * (world - 1) >= width:
        lawful = [ranks for ranks in WORLDS if share(ranks) * (ranks - 1) < width]
        name, block, _ = _binding(layer, dim)
        detail = f"{world} shares of whole blocks of {block}, none of them empty"
        raise DivideError(name, dim, width, detail, f"lawful   {worlds(lawful)}")
    places = tuple(min(start + share(world) * i, stop) for i in range(world + 1))
    _check(layer, dim, places, (start, stop, world))
    return places


def _check(
    layer: LayerDescription,
    dim: str,
    places: Sequence[int],
    span: tuple[int, int, int] | None,
    joined: bool = False,
) -> None:
    size = layer.sizes.get(dim, 1)
    for place in places:
        for axis in _bound(layer, dim):
            if not _exact(axis, dim, place, layer.sizes, joined):
                name, block, why = _binding(layer, dim)
                lawful = _lawful(layer, dim, *span[:2]) if span else ()
                raise CutError(name, dim, size, place, block, why, span and span[2], lawful)


def _bound(layer: LayerDescription, dim: str) -> list[Axis]:
    """The axes that a cut of a dimension has to be exact on."""
    axes = [axis for spec in layer.specs for axis in spec.axes]
    return [axis for axis in axes if axis.follows(dim) and axis.free is None]


def _exact(axis: Axis, dim: str, place: int, sizes: Mapping[str, int], joined: bool = False) -> bool:
    if place == 0 or (place == sizes.get(dim, 1) and not joined):
        return True
    step = axis.step(dim, sizes)
    if axis.never:
        return place == sizes.get(dim, 1) and place % axis.granule == 0
    return step > 0 and place % step == 0


def granule(layer: LayerDescription, dim: str) -> int:
    """Cuts of a dimension are lawful at multiples of this; 0 where it is never cut."""
    return _binding(layer, dim)[1]


def _binding(layer: LayerDescription, dim: str) -> tuple[str, int, str]:
    """The tensor that binds a dimension most, the joint granule, and the tensor's declaration."""
    bound = [
        (axis.step(dim, layer.sizes), spec)
        for spec in layer.specs
        for axis in spec.axes
        if axis.follows(dim) and axis.free is None
    ]
    if not bound:
        return layer.prefix, 1, f"no tensor has an axis {dim}"
    never = [spec for block, spec in bound if not block]
    spec = never[0] if never else max(bound, key=lambda pair: pair[0])[1]
    block = 0 if never else lcm(*(block for block, _ in bound))
    return layer.names.full(spec.name), block, f"as {spec.name} is ({', '.join(spec.text.split())})"


def _lawful(layer: LayerDescription, dim: str, start: int, stop: int) -> tuple[int, ...]:
    block = granule(layer, dim)
    width = stop - start
    return tuple(
        world
        for world in WORLDS
        if block
        and width % world == 0
        and all((start + width // world * i) % block == 0 for i in range(world))
    )
