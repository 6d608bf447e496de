"""Where queries, keys and values lie in the layers that hold them, so that each rank gets whole heads."""

from collections.abc import Sequence

from qload.errors import ArgumentError, ShapeError
from qload.loader import Heads, Part
from qload.methods.shards import divided
from qload.weights import Weights

Sizes = tuple[int, int]  # outputs of a head of queries or keys, and of a head of values


def qkv_parts(weights: Weights, prefixes: Sequence[str] | str, heads: Heads, sizes: Sizes) -> list[Part]:
    """The parts of a load of queries, keys and values, from three layers or of one that holds all.

    ShapeError where a layer is not of these heads; DivideError where the ranks cannot share them.
    """
    queries, keys = _counts(heads)
    widths = (queries * sizes[0], keys * sizes[0], keys * sizes[1])
    names = [prefixes] * 3 if isinstance(prefixes, str) else list(prefixes)
    if len(names) != 3:
        raise ArgumentError("prefixes", "those of queries, keys and values, or one of all", repr(prefixes))
    if isinstance(prefixes, str):
        _check(weights, prefixes, sum(widths), f"{queries} + {keys} + {keys} heads of {_said(sizes)}")
    else:
        for name, width, count, size in zip(
            names, widths, (queries, keys, keys), (*sizes[:1], *sizes), strict=True
        ):
            _check(weights, name, width, f"{count} heads of {size}")
    world = weights.process_group.size()
    parts = Heads(queries, keys).parts(list(zip(names, widths, strict=True)), world)
    if not isinstance(prefixes, str):
        return parts
    edges = (0, widths[0], widths[0] + widths[1], sum(widths))
    return [
        Part(prefixes, start, stop, part.copies)
        for part, start, stop in zip(parts, edges, edges[1:], strict=False)
    ]


def interleaved_part(weights: Weights, prefixes: Sequence[str] | str, heads: Heads, sizes: Sizes) -> Part:
    """The part of a layer that holds groups of queries with their key and value, in whole groups."""
    queries, keys = _counts(heads)
    if not isinstance(prefixes, str):
        raise ArgumentError("prefixes", "that of one layer, whose heads are interleaved", repr(prefixes))
    if queries % keys:
        raise ArgumentError("heads", "as many queries for each key", f"{queries} and {keys}")
    wanted = queries * sizes[0] + keys * sum(sizes)
    _check(weights, prefixes, wanted, f"{keys} groups of {queries // keys} + 1 + 1 heads of {_said(sizes)}")
    divided(prefixes, "key/value heads", keys, weights.process_group)
    return Part(prefixes)


def _counts(heads: Heads) -> tuple[int, int]:
    if heads.queries is None:
        raise ArgumentError("heads", "the number of queries too", f"queries=None, keys={heads.keys}")
    return heads.queries, heads.keys or heads.queries


def _check(weights: Weights, prefix: str, wanted: int, why: str) -> None:
    shape = weights.loader.shape(weights, prefix)
    if shape[0] != wanted:
        raise ShapeError(prefix, f"({wanted}, {shape[1]}) = (N, K), as N is {why}", shape)


def _said(sizes: Sizes) -> str:
    return f"{sizes[0]}" if sizes[0] == sizes[1] else f"{sizes[0]}, of values {sizes[1]}"
