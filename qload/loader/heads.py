"""`Heads`: shares of attention layers in whole heads, with key and value heads on several ranks if few."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from qload.errors import ArgumentError, DivideError, check_type, worlds
from qload.loader.base import Part, split_blocks
from qload.loader.sharding import WORLDS


@dataclass(frozen=True)
class Heads:
    """Numbers of attention heads among a layer's outputs, so that each rank gets whole heads.

    Query heads are shared equally. With fewer key heads than ranks, each key head is on several ranks: head
    `rank * keys // ranks`. ArgumentError without either number, or for a number less than 1.

    Attributes
    ----------
    queries
        Query heads; None: the layer has none.
    keys
        Key heads, with as many value heads; None: the layer has none.

    Examples
    --------
    One layer: `get_weights_col(qkv, heads=Heads(32, 8))`. Three layers:
    `get_multi_weights_col([q, k, v], heads=Heads(32, 8))`. One of the three:
    `get_weights_col(k, heads=Heads(keys=8))`.

    >>> import torch
    >>> from qload import FakeWorld, Heads, MemoryStorage, Weights, loader_from_config
    >>> rows = torch.arange(8.0)[:, None]  # four query heads, two key heads, two value heads
    >>> storage = MemoryStorage({"q.weight": rows[:4], "k.weight": rows[4:6], "v.weight": rows[6:]})
    >>> rank = list(FakeWorld(4))[3]
    >>> weights = Weights(storage, loader=loader_from_config(None), process_group=rank)
    >>> weights.get_multi_weights_col(["q", "k", "v"], heads=Heads(4, 2)).weight.flatten().tolist()
    [3.0, 5.0, 7.0]
    """

    queries: int | None = None
    keys: int | None = None

    def __post_init__(self) -> None:
        check_type("queries", self.queries, int | None)
        check_type("keys", self.keys, int | None)
        numbers = [count for count in (self.queries, self.keys) if count is not None]
        if not numbers or min(numbers) < 1:
            counts = f"queries={self.queries!r}, keys={self.keys!r}"
            raise ArgumentError("heads", "one or two numbers of heads: whole numbers, at least 1", counts)

    def parts(self, layers: Sequence[tuple[str, int]], world: int) -> list[Part]:
        """Parts of a load for `world` ranks, from prefix and N of each of its `layers`.

        DivideError for heads that the ranks cannot share, and for an N that the heads do not divide;
        ArgumentError for a wrong number of layers.
        """
        parts = []
        for (prefix, N), blocks in zip(layers, self._blocks(len(layers)), strict=True):
            copies = [self._copies(prefix, count, kind, world) for count, kind in blocks]
            edges = [0, *accumulate(split_blocks(prefix, "N", N, [count for count, _ in blocks]))]
            if len(blocks) == 1:
                parts.append(Part(prefix, copies=copies[0]))
            else:
                parts += [Part(prefix, *span, n) for span, n in zip(pairwise(edges), copies, strict=True)]
        return parts

    def check_equal_shares(self, prefix: str, world: int) -> None:
        """Raise DivideError if `world` equal shares of the layer `prefix` end inside a head."""
        fused = self.queries is not None and self.keys is not None
        for count, kind in ((self.queries, "query heads"), (self.keys, "key/value heads")):
            if world > 1 and count is not None and (fused or count % world):
                numbers = ", ".join(
                    f"{k}={v}" for k, v in (("queries", self.queries), ("keys", self.keys)) if v
                )
                remedy = f"remedy   heads=Heads({numbers}), which shares whole heads"
                raise DivideError(prefix, kind, count, f"equal shares of {world} ranks", remedy)

    def _blocks(self, layers: int) -> list[list[tuple[int, str]]]:
        """Blocks of each layer: number and kind of heads."""
        if self.queries is None or self.keys is None:
            one = (self.queries, "query") if self.queries else (self.keys or 0, "key/value")
            return [[one]] * layers
        all_three = [(self.queries, "query"), (self.keys, "key/value"), (self.keys, "key/value")]
        if layers == 1:
            return [all_three]
        if layers != 3:
            expected = "queries or keys alone, of layers that are not queries, keys and values, in this order"
            raise ArgumentError("heads", expected, f"both, for {layers} layers")
        return [[block] for block in all_three]

    def _copies(self, prefix: str, count: int, kind: str, world: int) -> int:
        """Ranks with the same heads; DivideError."""
        copies = _copies(count, world) if kind != "query" else int(count % world == 0)
        if not copies:
            hint = f"lawful   {worlds(self._lawful())}"
            raise DivideError(prefix, f"{kind} heads", count, f"{world} ranks", hint)
        return copies

    def _lawful(self) -> list[int]:
        return [
            size
            for size in WORLDS
            if (self.queries or size) % size == 0 and (self.keys is None or _copies(self.keys, size))
        ]


def _copies(heads: int, world: int) -> int:
    """Ranks with the same heads: several for few heads; 0 if the ranks cannot share them."""
    if heads % world == 0:
        return 1
    return 0 if world % heads else world // heads
