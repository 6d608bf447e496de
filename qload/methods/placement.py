"""Which share of a layer a module holds: its parts, its inputs, and its place among the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from qload.errors import ArgumentError, DivideError, ShapeError
from qload.loader import Part, Split
from qload.loader.exclusion import parts as parts_of
from qload.parallel import ALONE, ProcessGroup, Rank

QKV = ("q", "k", "v")  # what engines call three parts, which are 0, 1 and 2 as well


@dataclass(frozen=True)
class Placement:
    """A rank's share of a layer.

    Attributes
    ----------
    prefix
        The layer's name.
    names
        Those of its parts in the checkpoint, or the prefix of a layer of one part.
    ids
        The shard ids under which the parts are loaded.
    parts
        This rank's outputs of each part.
    K
        This rank's inputs.
    whole
        (N, K) of the whole layer, as the engine says them.
    group
        This rank's place in its world; where nothing tells it, that of rank 0.
    is_told
        Whether something tells it.
    """

    prefix: str
    names: tuple[str, ...]
    ids: tuple[int | str, ...]
    parts: tuple[int, ...]
    K: int
    whole: tuple[int, int]
    group: ProcessGroup
    is_told: bool

    @property
    def split(self) -> Split | None:
        """Along which dimension the ranks share the layer."""
        if self.whole[1] > self.K:
            return "K"
        return "N" if sum(self.parts) < self.whole[0] else None

    def part(self, shard_id: object, tensor: str) -> int:
        """The place of the part that a shard id means; ArgumentError where there is none."""
        known = [*self.ids, *(QKV if len(self.parts) == len(QKV) and self.ids == (0, 1, 2) else ())]
        for place, one in enumerate(known):
            if type(one) is type(shard_id) and one == shard_id:
                return place % len(self.parts)
        listed = ", ".join(map(repr, known))
        raise ArgumentError(f"{tensor}: shard_id", f"None or one of {listed}", repr(shard_id))

    def load_of_parts(self, shapes: Sequence[tuple[int, int]]) -> list[Part]:
        """What to load of parts of these shapes (N, K), or ShapeError where they are not this layer's."""
        return [
            Part(name, copies=self._copies(name, share, shape))
            for name, share, shape in zip(self.names, self.parts, shapes, strict=True)
        ]

    def load_of_whole(self, shape: tuple[int, int]) -> list[Part]:
        """What to load of a tensor (N, K) that has all parts one after another."""
        widths, parts, at = self._widths(shape[0]), [], 0
        for share, width in zip(self.parts, widths, strict=True):
            copies = self._copies(self.prefix, share, (width, shape[1]))
            parts.append(Part(self.prefix, at, at + width, copies))
            at += width
        if at != shape[0]:
            raise ShapeError(self.prefix, f"{(at, self.whole[1])} = (N, K)", shape)
        return parts

    def _copies(self, name: str, share: int, shape: tuple[int, int]) -> int:
        """How many ranks hold the same outputs of a part."""
        world = self.group.size() if self.split == "N" else 1
        ranks, rest = divmod(shape[0], share)
        if rest or not ranks or world % ranks or shape[1] != self.whole[1]:
            raise ShapeError(name, f"{(share * world, self.whole[1])} = (N, K)", shape)
        return world // ranks

    def _widths(self, N: int) -> list[int]:
        """The outputs of each part of a whole layer of N, whose later parts may be on several ranks."""
        world = self.group.size() if self.split == "N" else 1
        first, *rest = (share * world for share in self.parts)
        copies = sum(rest) // (N - first) if first < N and rest else 1
        return [first, *(width // max(copies, 1) for width in rest)]


def placement(
    layer: nn.Module, share: tuple[int, Sequence[int]], whole: tuple[int, int], prefix: str
) -> Placement:
    """The share (K, outputs of each part) that a module holds of a `whole` layer (N, K).

    ArgumentError for sizes that are no share; DivideError where no world has such a share.
    """
    K, parts = share[0], tuple(share[1])
    sizes = [K, *parts, *whole]
    if not parts or not all(type(size) is int and size > 0 for size in sizes):
        raise ArgumentError("output_partition_sizes", "sizes of at least 1", repr(share[1]))
    if whole[1] < K or sum(parts) > whole[0]:
        raise ArgumentError(
            "input_size_per_partition, output_partition_sizes",
            f"at most the whole layer (N, K) = {whole}",
            f"{(sum(parts), K)}",
        )
    shards = getattr(layer, "shards", ())
    same = len(shards) == len(parts)
    ids = tuple(shard.id for shard in shards) if same else tuple(range(len(parts)))
    made_of = parts_of(prefix)
    names = made_of if len(made_of) == len(parts) else [f"{prefix}.{i}" if prefix else f"{i}" for i in ids]
    told = _group(layer)
    group = _world(prefix, (K, sum(parts)), whole) if told is None else told
    one = (prefix,) if len(parts) == 1 else tuple(names)
    return Placement(prefix, one, ids, parts, K, whole, group, told is not None)


def _group(layer: Any) -> ProcessGroup | None:
    """What a module tells of the ranks: ours have a process group, those of engines two numbers."""
    group = getattr(layer, "process_group", None)
    if isinstance(group, ProcessGroup):
        return group
    rank, size = getattr(layer, "tp_rank", None), getattr(layer, "tp_size", None)
    return Rank(rank, size) if type(rank) is int and type(size) is int else None


def _world(prefix: str, share: tuple[int, int], whole: tuple[int, int]) -> ProcessGroup:
    """As many ranks as have equal shares; which one this is, is not told."""
    K, N = share
    for dim, own, size in (("K", K, whole[1]), ("N", N, whole[0])):
        if own < size:
            if size % own:
                raise DivideError(prefix or "layer", dim, size, f"shares of {own}")
            return Rank(0, size // own)
    return ALONE
