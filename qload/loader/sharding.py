"""Shares of a layer: cuts of all ranks, checked against its declaration, and reads of one rank's slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

from qload.errors import CutError, DivideError, MismatchError, worlds
from qload.lazy_torch import Tensor, torch
from qload.loader.base import Part, Split
from qload.loader.description import LayerDescription
from qload.loader.source import Rectangle, TensorSource
from qload.parallel import ProcessGroup
from qload.spec import Axis, ShareBounds, TensorSpec

VOCABULARIES = ("lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "word_embeddings")
REMEDY = "\n  remedy   get_partial_weights_col, whose last share may be short"
WORLDS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)  # world sizes that an error offers, where lawful


class TensorSlices(NamedTuple):
    """Slices of a tensor in a share; () is the whole tensor.

    `columns`: True for a flat tensor, to be read whole and cut by columns. `first`: start of this rank's
    share of a free axis, the offset of indices into it.
    """

    slices: tuple[slice, ...]
    columns: bool
    first: int = 0


@dataclass(frozen=True)
class Share:
    """One rank's share of a part.

    Attributes
    ----------
    layer
        The layer of the part.
    bounds
        Outputs and inputs of the share.
    k_places
        Cuts of K of all ranks.
    part
        Number of the part among the parts of its layer.
    slices
        Slices by field, shared by the same share of all equal layers.
    """

    layer: LayerDescription
    bounds: ShareBounds
    k_places: tuple[int, ...]
    part: int
    slices: dict[str, TensorSlices] = field(default_factory=dict, compare=False, repr=False)

    def slices_of(self, spec: TensorSpec) -> TensorSlices:
        """Slices of a tensor, along the axes of its view."""
        found = self.slices.get(spec.name)
        if found is None:
            found = self.slices[spec.name] = self._find_slices(spec)
        return found

    def _find_slices(self, spec: TensorSpec) -> TensorSlices:
        bounds = self.bounds
        is_layer = (bounds.n0, bounds.n1, bounds.k0, bounds.k1) == (0, bounds.N, 0, bounds.K)
        if is_layer and self.layer.sizes.get("P", 1) == 1:
            return TensorSlices((), columns=False)
        places = spec.places
        spans = [self.span(axis) for axis in places]
        index = tuple(slice(None) if span is None else slice(*span) for span in spans)
        return TensorSlices(
            index if any(span is not None for span in spans) else (),
            columns=not bounds.all_inputs and any(axis.flat for axis in places),
            first=_first_entry(spec.index_of, self) if spec.fact and spec.index_of else 0,
        )

    def span(self, axis: Axis) -> tuple[int, int] | None:
        """[start, stop) of a stored axis; None for a whole axis."""
        bounds, K = self.bounds, self.layer.K
        if axis.dim == "P" and self.layer.sizes["P"] > 1:
            return self.part, self.part + 1
        if axis.dim == "N":
            return axis.at(bounds.n0, bounds.N), axis.at(bounds.n1, bounds.N)
        if axis.flat:
            start = axis.at(bounds.n0 * K, bounds.N * K)
            return start, start + (axis.size((bounds.n1 - bounds.n0) * K) or 0)
        if axis.dim == "K" and len(self.k_places) > 2 and self._is_cut(axis):
            return axis.at(bounds.k0, K), axis.at(bounds.k1, K)
        return None

    def extent(self, axis: Axis) -> int:
        """Entries of the share on the axis of a join."""
        if axis.dim == "P":
            return 1
        if axis.flat:
            return self.bounds.extent(axis)
        start, stop = self.span(axis) or (0, 0)
        return stop - start

    def _is_cut(self, axis: Axis) -> bool:
        return axis.free is None or all(
            place in (0, self.bounds.K) or _exact(axis, "K", place, self.layer.sizes)
            for place in self.k_places
        )


def shares_of(
    group: ProcessGroup, layers: Mapping[str, LayerDescription], parts: Sequence[Part], split: Split | None
) -> list[Share]:
    """This rank's share of each part, with all cuts checked before any read."""
    numbers: Counter[str] = Counter()
    shares = []
    for part in parts:
        joined, number = part is not parts[-1], numbers[part.prefix]
        numbers[part.prefix] += 1
        shares.append(share(layers[part.prefix], part, split, group, joined=joined, number=number))
    for prefix, layer in layers.items():
        stored = layer.sizes.get("P", 1)
        if stored not in (1, numbers[prefix]):
            raise MismatchError(
                prefix,
                "scales of fused parts",
                f"a load in {stored} parts, as there are {stored} scales (get_weights_col_packed)",
                f"{numbers[prefix]} parts",
            )
    return shares


def share(
    layer: LayerDescription,
    part: Part,
    split: Split | None,
    group: ProcessGroup,
    *,
    joined: bool = False,
    number: int = 0,
) -> Share:
    """This rank's share of a part; CutError or DivideError, equal on all ranks.

    `joined`: True if another part follows, so that the end of this one is a cut. `number`: number of the part
    among the parts of its layer.
    """
    world, rank = group.size(), group.rank()
    request = (part.start, part.stop, part.copies, part.short, split, world, rank, joined, number)
    known: Share | None = layer.cuts.get(request)
    if known is None:
        known = layer.cuts[request] = _cut(layer, part, split, world, rank, joined, number)
    return Share(layer, known.bounds, known.k_places, known.part, known.slices)


def _cut(
    layer: LayerDescription,
    part: Part,
    split: Split | None,
    world: int,
    rank: int,
    joined: bool,
    number: int,
) -> Share:
    N, K = layer.N, layer.K
    start, stop = part.start, N if part.stop is None else part.stop
    _check_cuts(layer, "N", (start, stop), None, joined)
    n, k = (start, stop), (0, K)
    k_places: tuple[int, ...] = k
    if split == "N" and world > 1:
        place = _short_places if part.short else _places
        places, at = place(layer, "N", start, stop, world // part.copies), rank // part.copies
        n = (places[at], places[at + 1])
    if split == "K" and world > 1:
        k_places = _places(layer, "K", 0, K, world)
        k = (k_places[rank], k_places[rank + 1])
    return Share(layer, ShareBounds(*n, *k, N, K), k_places, number)


def rectangles(spec: TensorSpec, shares: Sequence[Share]) -> list[Rectangle]:
    """Slices that `read_tensor` asks a source for; for any tensor but a fact."""
    rectangles = []
    for share in shares if len(shares) == 1 or spec.joined() is not None else shares[:1]:
        index, columns, _ = share.slices_of(spec)
        name = share.layer.names.full(spec.name)
        rectangles.append(Rectangle(name, () if columns or spec.view is not None else index))
    return rectangles


def read_tensor(
    weights: TensorSource, spec: TensorSpec, shares: Sequence[Share], out: Tensor | None
) -> Tensor:
    """Read a tensor of all parts, joined along N; the first part's for a tensor without N.

    `out`: memory for the result, used if each part is a rectangle of the stored tensor.
    """
    if out is not None and not (spec.fact or spec.view is not None or shares[0].slices_of(spec).columns):
        return _read_into(weights, spec, shares, out)
    if keeps_words(spec, shares):
        return weights.read(shares[0].layer.names.full(spec.name), role=spec.role)
    first = read_part(weights, spec, shares[0])
    if len(shares) > 1:
        join = spec.joined()
        if join is not None:
            first = _read_joined(weights, spec, shares, first, join)
    return first if spec.view is None else _as_stored(first, spec, shares)


def keeps_words(spec: TensorSpec, shares: Sequence[Share]) -> bool:
    """Return whether packed codes stay as stored: those of a whole layer alone."""
    return spec.packing is not None and len(shares) == 1 and not shares[0].slices_of(spec).slices


def _read_joined(
    weights: TensorSource, spec: TensorSpec, shares: Sequence[Share], first: Tensor, join: int
) -> Tensor:
    """The first part and all others in one tensor."""
    extents = [share.extent(spec.places[join]) for share in shares]
    whole = first.new_empty([*first.shape[:join], sum(extents), *first.shape[join + 1 :]])
    at = 0
    for share, extent in zip(shares, extents, strict=True):
        part = first if at == 0 else read_part(weights, spec, share)
        whole.narrow(join, at, extent).copy_(part)
        at += extent
    return whole


def _read_into(weights: TensorSource, spec: TensorSpec, shares: Sequence[Share], out: Tensor) -> Tensor:
    join, at = spec.joined(), 0
    for share in shares if join is not None else shares[:1]:
        extent = share.extent(spec.places[join]) if join is not None and len(shares) > 1 else None
        target = out if extent is None or join is None else out.narrow(join, at, extent)
        name = share.layer.names.full(spec.name)
        if not weights.info(name).shape:
            target = target.reshape(())  # one entry
        weights.read_into(name, share.slices_of(spec).slices, target, role=spec.role)
        at += extent or 0
    return out


def join_parts(parts: Sequence[Tensor], spec: TensorSpec, shares: Sequence[Share]) -> Tensor:
    """Join resolved parts like `read_tensor` joins stored ones."""
    join = spec.joined()
    whole = parts[0] if join is None or len(parts) == 1 else torch.cat(list(parts), join)
    return whole if spec.view is None or keeps_words(spec, shares) else _as_stored(whole, spec, shares)


def read_part(weights: TensorSource, spec: TensorSpec, share: Share) -> Tensor:
    """Read this rank's slice of one part, along the axes of the tensor's view."""
    index, columns, first = share.slices_of(spec)
    if spec.fact:
        fact = weights.place(share.layer.facts[spec.name][index])
        return fact - first if first else fact
    name = share.layer.names.full(spec.name)
    if columns:
        return _cut_columns(weights.read(name, role=spec.role), spec.places, share)
    if spec.view is None:
        tensor = weights.read(name, index, role=spec.role)
        return tensor if tensor.ndim else tensor.reshape(1)
    return spec.to_view(weights.read(name, role=spec.role), share.layer.sizes)[index]


def _cut_columns(whole: Tensor, places: Sequence[Axis], share: Share) -> Tensor:
    """Columns of a tensor that is stored flat, row by row."""
    axis, bounds = places[0], share.bounds
    rows = whole.reshape(bounds.N, -1, *whole.shape[1:])
    columns = rows[bounds.n0 : bounds.n1, axis.at(bounds.k0, bounds.K) : axis.at(bounds.k1, bounds.K)]
    return columns.reshape(-1, *whole.shape[1:])


def _as_stored(tensor: Tensor, spec: TensorSpec, shares: Sequence[Share]) -> Tensor:
    """Reshape from the axes of the view to the stored axes."""
    first = shares[0].bounds
    outputs = sum(share.bounds.n1 - share.bounds.n0 for share in shares)
    sizes = {"N": outputs, "K": first.k1 - first.k0, "P": len(shares)}
    return spec.from_view(tensor, sizes)


def _first_entry(letter: str, share: Share) -> int:
    """Start of this rank's share of a free axis: the offset of indices into it."""
    spans = (share.span(axis) for spec in share.layer.specs for axis in spec.axes if axis.free == letter)
    return next((span[0] for span in spans if span), 0)


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
    _check_cuts(layer, dim, places, (start, stop, world))
    return places


def _short_places(layer: LayerDescription, dim: str, start: int, stop: int, world: int) -> tuple[int, ...]:
    """Cuts into blocks of whole granules, the last one short; DivideError for an empty share."""
    block, width = granule(layer, dim), stop - start
    if not block:
        return _places(layer, dim, start, stop, world)

    def width_per_rank(ranks: int) -> int:
        return -(-width // (ranks * block)) * block

    if width_per_rank(world) * (world - 1) >= width:
        lawful = [ranks for ranks in WORLDS if width_per_rank(ranks) * (ranks - 1) < width]
        name, block, _ = _binding(layer, dim)
        detail = f"{world} shares of whole blocks of {block}, none of them empty"
        raise DivideError(name, dim, width, detail, f"lawful   {worlds(lawful)}")
    places = tuple(min(start + width_per_rank(world) * i, stop) for i in range(world + 1))
    _check_cuts(layer, dim, places, (start, stop, world))
    return places


def _check_cuts(
    layer: LayerDescription,
    dim: str,
    places: Sequence[int],
    span: tuple[int, int, int] | None,
    joined: bool = False,
) -> None:
    size = layer.sizes.get(dim, 1)
    for place in places:
        if place == 0 or (place == size and not joined):
            continue  # the ends of a layer are cuts
        for axis in _binding_axes(layer, dim):
            if not _exact(axis, dim, place, layer.sizes):
                name, block, why = _binding(layer, dim)
                lawful = _lawful(layer, dim, *span[:2]) if span else ()
                raise CutError(name, dim, size, place, block, why, span and span[2], lawful)
        if place % _transform_step(layer, dim):
            name, block, why = _binding(layer, dim)
            lawful = _lawful(layer, dim, *span[:2]) if span else ()
            raise CutError(name, dim, size, place, block, why, span and span[2], lawful)


def _binding_axes(layer: LayerDescription, dim: str) -> list[Axis]:
    """Axes that bind the cuts of a dimension."""
    axes = [axis for spec in layer.specs for axis in spec.binding]
    return [axis for axis in axes if axis.follows(dim) and axis.free is None]


def _exact(axis: Axis, dim: str, place: int, sizes: Mapping[str, int]) -> bool:
    """Return whether every division of an axis is exact at a place."""
    step = axis.step(dim, sizes)
    if axis.never:
        return place == sizes.get(dim, 1) and place % axis.granule == 0
    return step > 0 and place % step == 0


def granule(layer: LayerDescription, dim: str) -> int:
    """Step of valid cuts of a dimension; 0 for a dimension without valid cuts."""
    return _binding(layer, dim)[1]


def _transform_step(layer: LayerDescription, dim: str) -> int:
    """Step of cuts between the blocks of a transform."""
    return 1 if layer.transforms is None else layer.transforms.step(dim)


def _binding(layer: LayerDescription, dim: str) -> tuple[str, int, str]:
    """Tensor with the largest step along a dimension, step of all cuts, and the reason for it.

    The reason is the declaration of the tensor, or a transform with larger blocks.
    """
    bound = [
        (axis.step(dim, layer.sizes), spec)
        for spec in layer.specs
        for axis in spec.binding
        if axis.follows(dim) and axis.free is None
    ]
    if not bound:
        return layer.prefix, 1, f"no tensor has an axis {dim}"
    never = [spec for block, spec in bound if not block]
    spec = never[0] if never else max(bound, key=lambda pair: pair[0])[1]
    block = 0 if never else lcm(*(block for block, _ in bound))
    text = spec.text if any(axis.follows(dim) for axis in spec.axes) else spec.view or spec.text
    step, why = _transform_step(layer, dim), f"as {spec.name} is ({', '.join(text.split())})"
    if block and step > block:
        why = f"as the layer transforms its {layer.transforms}"
    return layer.names.full(spec.name), lcm(block, step), why


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
