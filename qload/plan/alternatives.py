"""What can be done with a layer that ranks cannot share as loads share it, and what that costs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from qload.errors import CutError, DivideError
from qload.loader import LayerDescription
from qload.loader.cuts import granule
from qload.models.stored_layers import SharedMatrix

Kind = Literal["uneven", "padded", "copied", "whole"]


@dataclass(frozen=True)
class Alternative:
    """A lawful way to share a layer that equal shares are no way for.

    Attributes
    ----------
    kind
        "uneven": shares of whole groups or blocks, the last of what is left; "padded": as many zeros as make
        all shares equal; "copied": all key and value heads on every rank; "whole": all of it on every rank.
    text
        What each rank then has.
    bytes
        What the fullest rank holds more than an equal share of the stored bytes.
    """

    kind: Kind
    text: str
    bytes: int


def alternatives(
    layer: LayerDescription, matrix: SharedMatrix, error: CutError | DivideError, ranks: int, stored: int
) -> tuple[Alternative, ...]:
    """The lawful ways to share a `layer` of `stored` bytes that an `error` refuses, the cheapest first."""
    heads = matrix.heads
    if heads is not None and isinstance(error, DivideError) and "heads" in str(error.dim):
        found = [*_of_heads(layer, matrix, ranks, stored)]
    else:
        found = [*_of_granules(layer, matrix, ranks, stored)]
    whole = stored - stored // ranks
    found.append(Alternative("whole", f"all of the layer on each of {ranks} ranks", whole))
    return tuple(sorted(found, key=lambda each: each.bytes))


def _of_heads(
    layer: LayerDescription, matrix: SharedMatrix, ranks: int, stored: int
) -> Iterator[Alternative]:
    """Heads of zeros beside those of queries; all those of keys and values where they cannot be shared."""
    queries, keys = (matrix.heads.queries, matrix.heads.keys) if matrix.heads else (None, None)
    total = (queries or 0) + 2 * (keys or 0) if queries else keys or 0
    each = stored // total if total else 0
    if queries and queries % ranks:
        padded = -(-queries // ranks) * ranks
        text = f"{padded} query heads, {padded - queries} of them zero, {padded // ranks} for each rank"
        copied = 2 * (keys or 0) * each if keys else 0
        yield Alternative("padded", text, padded // ranks * each + copied - stored // ranks)
    elif keys:
        held = (2 * keys + queries // ranks if queries else keys) * each
        yield Alternative(
            "copied", f"all {keys} key/value heads on each of {ranks} ranks", held - stored // ranks
        )


def _of_granules(
    layer: LayerDescription, matrix: SharedMatrix, ranks: int, stored: int
) -> Iterator[Alternative]:
    """Shares of whole granules: as few as will do, or as many for all once zeros are added."""
    dim = matrix.split or "N"
    size, block = layer.sizes.get(dim, 1) // matrix.blocks, granule(layer, dim)
    if not block:
        return
    share = -(-size // (ranks * block)) * block
    more = stored * share // size - stored // ranks
    what = "outputs" if dim == "N" else "inputs"
    last = size - share * (ranks - 1)
    if last > 0 and last != share:
        text = f"{share} {what} for each rank but the last, which has {last}: whole blocks of {block}"
        yield Alternative("uneven", text, more)
    padded = share * ranks
    if padded > size:
        text = f"{dim} = {padded}, {padded - size} {what} of zeros, {share} for each rank"
        yield Alternative("padded", text, more)
