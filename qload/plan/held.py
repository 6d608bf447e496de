"""The bytes that a rank holds of a layer, told by the cuts that a load makes."""

from collections.abc import Sequence

from qload.loader.cuts import Share
from qload.spec import TensorSpec


def held_bytes(shares: Sequence[Share]) -> int:
    """Of the shares of one layer's parts that a rank loads together, as they are stored.

    A tensor that is not cut along the outputs is held once.
    """
    layer, total = shares[0].layer, 0
    for spec in layer.specs:
        pieces = shares if spec.joined() is not None else shares[:1]
        total += sum(_elements(spec, one) for one in pieces) * layer.dtypes[spec.name].itemsize
    return total


def _elements(spec: TensorSpec, share: Share) -> int:
    """How many entries of a tensor are in a share."""
    count, here, sizes = 1, share.bounds, share.layer.sizes
    for axis in spec.places:
        piece = share.piece(axis)
        whole = axis.size(axis.logical(sizes) or 0) or 0
        count *= whole if piece is None else piece[1] - piece[0]
        if axis.flat and not here.all_inputs:  # rows of all elements, of which some columns stay
            count = count * (here.k1 - here.k0) // here.K
    return count
