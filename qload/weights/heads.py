"""How ranks share the heads of attention: whole ones, and those of keys and values repeated where few."""

from qload.errors import DivideError, worlds
from qload.loader import Part, split_blocks
from qload.loader.cuts import WORLDS


def qkv_parts(prefix: str, N: int, queries: int, keys: int, world: int) -> list[Part]:
    """Queries, keys and values of a layer of N outputs, each cut between heads; DivideError otherwise."""
    q, k, _ = split_blocks(prefix, "N", N, (queries, keys, keys))
    lawful = [size for size in WORLDS if queries % size == 0 and _copies(keys, size)]
    copies = _copies(keys, world)
    for heads, count, well in (("query", queries, queries % world == 0), ("key/value", keys, copies > 0)):
        if not well:
            raise DivideError(prefix, f"{heads} heads", count, f"{world} ranks", f"lawful   {worlds(lawful)}")
    edges = (0, q, q + k, N)
    return [Part(prefix, *edges[:2]), *(Part(prefix, a, a + k, copies) for a in edges[1:3])]


def _copies(heads: int, world: int) -> int:
    """How many ranks hold the same heads: several where there are fewer heads than ranks; 0: they cannot."""
    if heads % world == 0:
        return 1
    return 0 if world % heads else world // heads
