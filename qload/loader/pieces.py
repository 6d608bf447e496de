"""One tensor of a layer: this rank's piece of each part, joined. No format slices by hand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qload.loader.cuts import Share
from qload.loader.source import Rectangle, TensorSource, fill, placed
from qload.spec import Axis, TensorSpec


def read(
    weights: TensorSource, spec: TensorSpec, shares: Sequence[Share], out: Tensor | None = None
) -> Tensor:
    """The parts of a tensor joined along their N, or the first where it has none.

    `out`: where they may be written to, which is then what is returned.
    """
    if out is not None and _is_read_as_it_lies(spec, shares):
        return _read_into(weights, spec, shares, out)
    first = piece(weights, spec, shares[0])
    join = spec.joined()
    if join is None or len(shares) == 1:
        return _as_stored(first, spec, shares)
    extents = [one.extent(spec.places[join]) for one in shares]
    whole = first.new_empty([*first.shape[:join], sum(extents), *first.shape[join + 1 :]])
    at = 0
    for one, extent in zip(shares, extents, strict=True):
        part = first if at == 0 else piece(weights, spec, one)
        whole.narrow(join, at, extent).copy_(part)
        at += extent
    return _as_stored(whole, spec, shares)


def rectangles(spec: TensorSpec, shares: Sequence[Share]) -> list[Rectangle]:
    """What `read` asks a source for, of a tensor that is no fact."""
    found = []
    for one in shares if spec.joined() is not None else shares[:1]:
        strided = not one.bounds.all_inputs and any(axis.flat for axis in spec.places)
        whole = strided or spec.view is not None
        found.append(Rectangle(one.layer.names.full(spec.name), () if whole else _index(one, spec)))
    return found


def _is_read_as_it_lies(spec: TensorSpec, shares: Sequence[Share]) -> bool:
    """Whether each part is a rectangle of what is stored."""
    strided = not shares[0].bounds.all_inputs and any(axis.flat for axis in spec.places)
    return not spec.fact and spec.view is None and not strided


def _read_into(weights: TensorSource, spec: TensorSpec, shares: Sequence[Share], out: Tensor) -> Tensor:
    join, at = spec.joined(), 0
    for one in shares if join is not None else shares[:1]:
        extent = one.extent(spec.places[join]) if join is not None and len(shares) > 1 else None
        place = out if extent is None or join is None else out.narrow(join, at, extent)
        name = one.layer.names.full(spec.name)
        if not weights.info(name).shape:
            place = place.reshape(())  # of one entry
        fill(weights, name, _index(one, spec), place, spec.role)
        at += extent or 0
    return out


def join(parts: Sequence[Tensor], spec: TensorSpec, shares: Sequence[Share]) -> Tensor:
    """Parts that `resolve` has made, joined as `read` joins what is stored."""
    along = spec.joined()
    whole = parts[0] if along is None or len(parts) == 1 else torch.cat(list(parts), along)
    return _as_stored(whole, spec, shares)


def piece(weights: TensorSource, spec: TensorSpec, share: Share) -> Tensor:
    """This rank's piece of one part, along the places where the tensor is cut."""
    name, places = share.layer.names.full(spec.name), spec.places
    if spec.fact:
        fact = placed(weights, share.layer.facts[spec.name][_index(share, spec)])
        first = _first(spec.index_of, share) if spec.index_of else 0
        return fact - first if first else fact
    strided = not share.bounds.all_inputs and any(axis.flat for axis in places)
    if strided:
        return _columns(weights.read(name, role=spec.role), places, share)
    if spec.view is None:
        read = weights.read(name, _index(share, spec), role=spec.role)
        return read.reshape(1) if read.ndim == 0 else read
    sizes = share.layer.sizes
    extents = [axis.size(axis.logical(sizes) or 0) or 0 for axis in places]
    return weights.read(name, role=spec.role).reshape(extents)[_index(share, spec)]


def _columns(whole: Tensor, places: Sequence[Axis], share: Share) -> Tensor:
    """Some columns of a tensor that lies flat, row by row."""
    axis, here = places[0], share.bounds
    rows = whole.reshape(here.N, -1, *whole.shape[1:])
    columns = rows[here.n0 : here.n1, axis.at(here.k0, here.K) : axis.at(here.k1, here.K)]
    return columns.reshape(-1, *whole.shape[1:])


def _as_stored(tensor: Tensor, spec: TensorSpec, shares: Sequence[Share]) -> Tensor:
    """From the places where it is cut back to the axes it is stored with."""
    if spec.view is None:
        return tensor
    first = shares[0].bounds
    outputs = sum(one.bounds.n1 - one.bounds.n0 for one in shares)
    sizes = {"N": outputs, "K": first.k1 - first.k0, "P": len(shares)}
    return tensor.reshape([axis.size(axis.logical(sizes) or 0) or 0 for axis in spec.axes])


def _index(share: Share, spec: TensorSpec) -> tuple[slice, ...]:
    return share.index(spec.text if spec.view is None else spec.view, spec.places)


def _first(letter: str, share: Share) -> int:
    """Where this rank's piece of a free axis begins, which an index into it counts from."""
    cut = (share.piece(axis) for spec in share.layer.specs for axis in spec.axes if axis.free == letter)
    return next((found[0] for found in cut if found), 0)
