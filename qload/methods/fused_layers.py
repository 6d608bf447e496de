"""Several of a checkpoint's linear layers in one: each is loaded under its shard id, or all at once."""

from collections.abc import Sequence
from typing import Unpack

from qload.errors import DivideError
from qload.methods.layers import ColumnParallelLinear, Options
from qload.methods.shards import Shard, divided


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Layers of the same inputs, such as gate and up; part i is loaded with `shard_id` i.

    Without `shard_id` a tensor holds all parts one after another. A rank has its share of every part.

    Parameters
    ----------
    input_size, output_sizes
        K, and N of each part, of the whole layer.
    bias, options
        Those of `LinearBase`.
    """

    def __init__(
        self, input_size: int, output_sizes: Sequence[int], bias: bool = True, **options: Unpack[Options]
    ) -> None:
        self.output_sizes = tuple(output_sizes)
        super().__init__(input_size, sum(output_sizes), bias, **options)

    def _shards(self) -> tuple[Shard, ...]:
        group, name = self.process_group, self.prefix or "layer"
        return tuple(
            Shard(part, size, divided(name, f"N of part {part}", size, group), group.rank())
            for part, size in enumerate(self.output_sizes)
        )


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values, loaded with `shard_id` "q", "k" and "v".

    A rank has an equal share of the heads, or DivideError. Key and value heads that are fewer than the ranks
    are each held by several of them, which follow one another.

    Parameters
    ----------
    hidden_size
        K of the whole layer.
    head_size, v_head_size
        Outputs of a head; of a head of values, where these are wider or narrower.
    total_num_heads, total_num_kv_heads
        Heads of queries, and of keys and values; None: as many.
    bias, options
        Those of `LinearBase`.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        *,
        v_head_size: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        kv = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        self.head_size, self.v_head_size = head_size, v_head_size or head_size
        self.total_num_heads, self.total_num_kv_heads = total_num_heads, kv
        whole = total_num_heads * head_size + kv * (head_size + self.v_head_size)
        super().__init__(hidden_size, whole, bias, **options)

    def _shards(self) -> tuple[Shard, ...]:
        group, name, kv = self.process_group, self.prefix or "layer", self.total_num_kv_heads
        world, rank = group.size(), group.rank()
        self.num_heads = divided(name, "query heads", self.total_num_heads, group)
        if kv % world and world % kv:
            raise DivideError(name, "key and value heads", kv, f"{world} ranks, nor these into the heads")
        self.num_kv_heads, self.num_kv_head_replicas = max(kv // world, 1), max(world // kv, 1)
        place = rank // self.num_kv_head_replicas
        key, value = self.head_size, self.v_head_size
        return (
            Shard("q", self.total_num_heads * key, self.num_heads * key, rank),
            Shard("k", kv * key, self.num_kv_heads * key, place),
            Shard("v", kv * value, self.num_kv_heads * value, place),
        )
