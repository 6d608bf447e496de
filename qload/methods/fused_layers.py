"""Several of a checkpoint's linear layers in one: each is loaded under its shard id, or all at once."""

from collections.abc import Sequence
from typing import Self, Unpack

import torch
from torch import Tensor

from qload.errors import DivideError
from qload.loader import Heads, Part
from qload.methods.layers import ColumnParallelLinear, Options
from qload.methods.loaded import LinearFactory, equal_parts, load_linear
from qload.methods.qkv_parts import interleaved_part, qkv_parts
from qload.methods.shards import Shard, divided
from qload.weights import Weights


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

    @classmethod
    def load(  # type: ignore[override]  # several layers, or one that holds several
        cls, weights: Weights, prefixes: Sequence[str] | str, *, make: LinearFactory | None = None
    ) -> Self:
        """This rank's outputs of each of the layers that `weights` has under `prefixes`, and of their biases.

        One prefix: of a layer that holds two of equal size, gate and up; DivideError for an odd one. Layers
        that are not stored alike are multiplied one after another. `make`: as of `ReplicatedLinear.load`.
        """
        if isinstance(prefixes, str):
            half, rest = divmod(weights.loader.shape(weights, prefixes)[0], 2)
            if rest:
                raise DivideError(prefixes, "N", 2 * half + rest, "gate and up")
            parts = [Part(prefixes, 0, half), Part(prefixes, half, 2 * half)]
        else:
            parts = equal_parts(weights, prefixes)
        loaded = load_linear(weights, parts, "N", make)
        layer = cls._around(weights, ", ".join(dict.fromkeys(part.prefix for part in parts)), loaded)
        layer.output_sizes = tuple(size * weights.process_group.size() for size in loaded.parts)
        return layer

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

    interleaved: bool = False  # whether the heads of a loaded layer are stored group by group

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

    @classmethod
    def load(  # type: ignore[override]  # three layers, or one that holds them
        cls,
        weights: Weights,
        prefixes: Sequence[str] | str,
        heads: Heads,
        *,
        head_size: int,
        v_head_size: int | None = None,
        interleaved: bool = False,
        make: LinearFactory | None = None,
    ) -> Self:
        """This rank's whole heads of queries, keys and values under `prefixes`, and of their biases.

        ShapeError where a layer is not of these `heads`; DivideError where the ranks cannot share them.

        Parameters
        ----------
        weights
            Where they are.
        prefixes
            Of the three layers, or of one that holds all.
        heads
            How many of queries, and of keys and values.
        head_size, v_head_size
            Outputs of a head; of a head of values, where these are wider or narrower.
        interleaved
            Whether the one layer holds the queries of a key, this key and its value, and then the next, as
            GPT-NeoX does. Outputs are put in the order of all others: weights, of any format, and biases
            alike.
        make
            As of `ReplicatedLinear.load`.
        """
        value, group = v_head_size or head_size, weights.process_group
        sizes = (head_size, value)
        if interleaved:
            parts = [interleaved_part(weights, prefixes, heads, sizes)]
        else:
            parts = qkv_parts(weights, prefixes, heads, sizes)
        loaded = load_linear(weights, parts, "N", make)
        layer = cls._around(weights, ", ".join(dict.fromkeys(part.prefix for part in parts)), loaded)
        kv = heads.keys or heads.queries or 1
        layer.head_size, layer.v_head_size = sizes
        layer.total_num_heads, layer.total_num_kv_heads = heads.queries or kv, kv
        layer.num_heads = layer.total_num_heads // group.size()
        layer.num_kv_heads, layer.num_kv_head_replicas = (
            max(kv // group.size(), 1),
            max(group.size() // kv, 1),
        )
        layer.interleaved = interleaved
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """X (..., K) -> this rank's queries, keys and values, one after another."""
        y = super().forward(x)
        if not self.interleaved:
            return y
        each = self.num_heads // self.num_kv_heads * self.head_size
        groups = y.reshape(*y.shape[:-1], self.num_kv_heads, -1)
        runs = torch.split(groups, [each, self.head_size, self.v_head_size], -1)
        return torch.cat([run.flatten(-2) for run in runs], -1)

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
