"""Layers of a tensor-parallel model: a rank's share of linear layers, fused layers and experts.

    layer = ColumnParallelLinear(K, N, quant_config=config, prefix="mlp.up_proj", process_group=group)
    layer.qweight.weight_loader(layer.qweight, tensor)           # for every parameter
    layer.quant_method.process_weights_after_loading(layer)
    y = layer(x)

    layer = RowParallelLinear.load(weights, "mlp.down_proj")     # from an open checkpoint, in one call
    y = layer(x)

A layer of the first kind does not communicate: the outputs of a column-parallel layer are a share, those of a
row-parallel layer a summand, and the caller gathers or reduces them. A loaded layer does so itself.
"""

from collections.abc import Callable, Sequence
from typing import Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, DivideError, ShapeError
from qload.experts import ExpertFacts, ExpertSplit, ExpertsWeight
from qload.kernels.chips import uncast
from qload.kernels.declared import Maximum
from qload.kernels.dtypes import DTYPES
from qload.loader import Heads, Part
from qload.methods.base import LinearMethodBase, QuantizationConfig, UnquantizedLinearMethod
from qload.methods.checkpoint_linear import (
    LinearFactory,
    LoadedLinear,
    LoadedLinearMethod,
    equal_parts,
    load_linear,
    maximum_for,
)
from qload.methods.parameters import (
    RestoringModule,
    Shard,
    clear_parameter,
    divide,
    empty_parameter,
    fill,
    full_name,
    load_inputs,
    load_outputs,
    register_weight,
)
from qload.parallel import ALONE, Collectives, ProcessGroup, Rank, collectives_of
from qload.weights import Weights

ExpertsFactory = Callable[[ExpertsWeight, Maximum], nn.Module]


class Options(TypedDict, total=False):
    """Keyword arguments of all linear layers; see `LinearBase`."""

    params_dtype: torch.dtype | None
    quant_config: QuantizationConfig | None
    prefix: str
    process_group: ProcessGroup | None


class LinearBase(RestoringModule):
    """Linear layer (..., K) -> (..., N), whose `quant_method` registers, prepares and reads its parameters.

    A move of the module moves them; only plain weights follow a cast.

    Parameters
    ----------
    input_size, output_size
        K and N of the whole layer.
    bias
        Whether there is a parameter `bias`, of this rank's outputs.
    options
        The keyword arguments below.
    params_dtype
        Of the parameters with plain numbers; None: torch's default dtype.
    quant_config
        Chooses the method; None, or a config without a method for this layer: plain weights. ArgumentError
        for a method that is not one of linear layers.
    prefix
        Name of the layer in the checkpoint.
    process_group
        Anything with `rank()` and `size()`; None: a world of one rank.
    """

    bias: nn.Parameter | None
    collectives: Collectives | None = None  # of a loaded layer that gathers or sums its outputs

    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, **options: Unpack[Options]
    ) -> None:
        super().__init__()
        prefix, quant_config = options.get("prefix", ""), options.get("quant_config")
        self.input_size: int = input_size
        self.output_size: int = output_size
        self.prefix: str = prefix
        self.params_dtype: torch.dtype = options.get("params_dtype") or torch.get_default_dtype()
        group = options.get("process_group")
        self.process_group: ProcessGroup = ALONE if group is None else group
        Rank(self.process_group.rank(), self.process_group.size())  # refuses a rank outside of its world
        method = quant_config.get_quant_method(self, prefix) if quant_config else None
        if method is not None and not isinstance(method, LinearMethodBase):
            raise ArgumentError("quant_config", "a LinearMethodBase for a linear layer", repr(method))
        self.quant_method: LinearMethodBase = method or UnquantizedLinearMethod()
        self._create_parameters(bias)

    @classmethod
    def _from_loaded(cls, weights: Weights, prefix: str, loaded: LoadedLinear) -> Self:
        """Create a layer without parameters, which multiplies by a loaded module."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.prefix, group = prefix, weights.process_group
        layer.process_group = Rank(group.rank(), group.size())
        layer.params_dtype = weights.dtype or torch.get_default_dtype()
        layer.output_size, layer.input_size = loaded.whole
        layer.output_size_per_partition, layer.input_size_per_partition = loaded.shape
        layer.output_partition_sizes, layer.shards = list(loaded.parts), ()
        layer.quant_method, layer.typed_linear = LoadedLinearMethod(), loaded.linear
        layer.register_parameter("bias", None)
        return layer

    def _create_parameters(self, bias: bool) -> None:
        self.input_size_per_partition: int = self._input_share()
        self.shards: tuple[Shard, ...] = self._output_shards()
        self.output_partition_sizes: list[int] = [shard.share for shard in self.shards]
        self.output_size_per_partition: int = sum(self.output_partition_sizes)
        self.quant_method.create_weights(
            self,
            self.input_size_per_partition,
            self.output_partition_sizes,
            self.input_size,
            self.output_size,
            self.params_dtype,
            weight_loader=self.weight_loader,
        )
        if not bias:
            self.register_parameter("bias", None)
            return
        values = empty_parameter((self.output_size_per_partition,), self.params_dtype)
        register_weight(self, "bias", values, {"output_dim": 0, "weight_loader": self.weight_loader})

    def _input_share(self) -> int:
        """Return this rank's inputs."""
        return self.input_size

    def _output_shards(self) -> tuple[Shard, ...]:
        """Return this rank's outputs of each part."""
        return (Shard(0, self.output_size, self.output_size, 0),)

    def weight_loader(self, param: Tensor, loaded_weight: Tensor, shard_id: int | str | None = None) -> None:
        """Fill `param` with this rank's share of a checkpoint's tensor `loaded_weight`.

        `shard_id`: the tensor's part of a fused layer; ArgumentError for an unknown part. ShapeError,
        DtypeError or CastError for a tensor that does not fit.
        """
        buffer_loader = getattr(param, "buffer_loader", None)
        if buffer_loader is not None:  # the method cuts the tensor, by the declaration of its format
            buffer_loader(param, loaded_weight, shard_id)
            return
        names = (name for name, own in self.named_parameters(recurse=False) if own is param)
        self._fill(param, loaded_weight, shard_id, full_name(self, next(names, "parameter")))

    def _fill(self, param: Tensor, loaded: Tensor, shard_id: int | str | None, tensor: str) -> None:
        """Fill a parameter with the share of a tensor, cut by the parameter's attributes."""
        if shard_id is not None:
            raise ArgumentError(f"{tensor}: shard_id", "None, of a layer of one part", repr(shard_id))
        fill(param.data, loaded, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this rank's inputs x (..., K) -> its outputs (..., N), in the dtype of x."""
        return self.quant_method.apply(self, x, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move all parameters, and cast plain ones; parameters with new memory are empty."""
        on_meta = {name for name, param in self.named_parameters(recurse=False) if param.is_meta}
        super()._apply(fn if isinstance(self.quant_method, UnquantizedLinearMethod) else uncast(fn), recurse)
        for name in on_meta:
            if not getattr(self, name).is_meta:
                clear_parameter(getattr(self, name))
        return self

    def extra_repr(self) -> str:
        """Return this rank's sizes and the method."""
        sizes = f"in_features={self.input_size_per_partition}, out_features={self.output_size_per_partition}"
        rank = f"rank {self.process_group.rank()} of {self.process_group.size()}"
        bias = getattr(getattr(self, "typed_linear", self), "bias", None)
        return f"{sizes}, bias={bias is not None}, {rank}, {type(self.quant_method).__name__}"


class ReplicatedLinear(LinearBase):
    """Linear layer that is whole on every rank."""

    @classmethod
    def load(cls, weights: Weights, prefix: str, *, make: LinearFactory | None = None) -> Self:
        """Load the whole layer `prefix` of `weights`, in its stored format, with its bias.

        `make`: returns the module (..., K) -> (..., N) for a weight, its bias (N,) or None, and a function
        for the maximum over the ranks or None; default: `Weight.get_linear`.
        """
        return cls._from_loaded(weights, prefix, load_linear(weights, [Part(prefix)], None, make))


class ColumnParallelLinear(LinearBase):
    """Linear layer with N / ranks outputs on each rank, and all inputs; DivideError for uneven shares."""

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        *,
        heads: Heads | None = None,
        gather_output: bool = False,
        make: LinearFactory | None = None,
    ) -> Self:
        """Load this rank's outputs of the layer `prefix` of `weights`, and of its bias.

        `heads`: attention heads, each whole on a rank. `gather_output`: every rank returns all outputs;
        ArgumentError if several ranks have the same ones. `make`: as in `ReplicatedLinear.load`.
        """
        if heads is None:
            parts = equal_parts(weights, [prefix])
        else:
            N, _ = weights.loader.shape(weights, prefix)
            parts = heads.parts([(prefix, N)], weights.process_group.size())
        if gather_output and (len(parts) > 1 or parts[0].copies > 1):
            raise ArgumentError("gather_output", "False, as heads are fused or on several ranks", "True")
        ranks = collectives_of(weights.process_group) if gather_output else None
        layer = cls._from_loaded(weights, prefix, load_linear(weights, parts, "N", make))
        layer.collectives = ranks
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> this rank's outputs (..., N), or gathered ones, in the dtype of x."""
        y = super().forward(x)
        return y if self.collectives is None else self.collectives.gathered(y)

    def _output_shards(self) -> tuple[Shard, ...]:
        group = self.process_group
        share = divide(self.prefix or "layer", "N", self.output_size, group)
        return (Shard(0, self.output_size, share, group.rank()),)

    def _fill(self, param: Tensor, loaded: Tensor, shard_id: int | str | None, tensor: str) -> None:
        load_outputs(param, loaded, self.shards, shard_id, tensor)


class RowParallelLinear(LinearBase):
    """Linear layer with K / ranks of the inputs on each rank, whose outputs are a summand.

    Rank 0 adds the bias. DivideError for uneven shares.
    """

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        *,
        reduce_results: bool = True,
        make: LinearFactory | None = None,
    ) -> Self:
        """Load this rank's inputs of the layer `prefix` of `weights`; rank 0 has the bias.

        `reduce_results`: every rank returns the sum; False: its summand. `make`: as in
        `ReplicatedLinear.load`. Inputs quantized by their maximum are quantized by that of all ranks.
        """
        ranks = collectives_of(weights.process_group) if reduce_results else None
        layer = cls._from_loaded(weights, prefix, load_linear(weights, [Part(prefix)], "K", make))
        layer.collectives = ranks
        return layer

    def _input_share(self) -> int:
        return divide(self.prefix or "layer", "K", self.input_size, self.process_group)

    def _fill(self, param: Tensor, loaded: Tensor, shard_id: int | str | None, tensor: str) -> None:
        if shard_id is not None:
            raise ArgumentError(f"{tensor}: shard_id", "None, of a layer of one part", repr(shard_id))
        load_inputs(param, loaded, self.process_group, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this rank's inputs x (..., K) -> (..., N) in the dtype of x: a summand, or the sum."""
        y = self.quant_method.apply(self, x, self.bias if self.process_group.rank() == 0 else None)
        return y if self.collectives is None else self.collectives.summed(y)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Layers with the same inputs, such as gate and up; part i is loaded with `shard_id` i.

    Without a `shard_id` a tensor has all parts in order. A rank has its share of every part.

    Parameters
    ----------
    input_size, output_sizes
        K, and N of each part, of the whole layer.
    bias, options
        As in `LinearBase`.
    """

    def __init__(
        self, input_size: int, output_sizes: Sequence[int], bias: bool = True, **options: Unpack[Options]
    ) -> None:
        self.output_sizes = tuple(output_sizes)
        super().__init__(input_size, sum(output_sizes), bias, **options)

    @classmethod
    def load(  # type: ignore[override]  # several layers, or a fused one
        cls, weights: Weights, prefixes: Sequence[str] | str, *, make: LinearFactory | None = None
    ) -> Self:
        """Load this rank's outputs of each of the layers `prefixes` of `weights`, and of their biases.

        One prefix: a layer of two equal parts, gate and up; DivideError for an odd one. Layers in different
        formats are multiplied one after another. `make`: as in `ReplicatedLinear.load`.
        """
        if isinstance(prefixes, str):
            half, rest = divmod(weights.loader.shape(weights, prefixes)[0], 2)
            if rest:
                raise DivideError(prefixes, "N", 2 * half + rest, "gate and up")
            parts = [Part(prefixes, 0, half), Part(prefixes, half, 2 * half)]
        else:
            parts = equal_parts(weights, prefixes)
        loaded = load_linear(weights, parts, "N", make)
        layer = cls._from_loaded(weights, ", ".join(dict.fromkeys(part.prefix for part in parts)), loaded)
        layer.output_sizes = tuple(size * weights.process_group.size() for size in loaded.parts)
        return layer

    def _output_shards(self) -> tuple[Shard, ...]:
        group, name = self.process_group, self.prefix or "layer"
        return tuple(
            Shard(part, size, divide(name, f"N of part {part}", size, group), group.rank())
            for part, size in enumerate(self.output_sizes)
        )


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values, loaded with `shard_id` "q", "k" and "v".

    A rank has an equal share of the heads, else DivideError. If there are fewer key and value heads than
    ranks, each is on several consecutive ranks.

    Parameters
    ----------
    hidden_size
        K of the whole layer.
    head_size, v_head_size
        Outputs of a head, and of a head of values if it has another size.
    total_num_heads, total_num_kv_heads
        Heads of queries, and of keys and values; None: as many.
    bias, options
        As in `LinearBase`.
    """

    interleaved: bool = False  # a loaded layer with heads stored group by group

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
    def load(  # type: ignore[override]  # three layers, or a fused one
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
        """Load this rank's whole heads of queries, keys and values under `prefixes`, and of their biases.

        ShapeError for a layer without these `heads`; DivideError if the ranks cannot share them.

        Parameters
        ----------
        weights
            The checkpoint.
        prefixes
            Of the three layers, or of a fused one.
        heads
            Numbers of heads of queries, and of keys and values.
        head_size, v_head_size
            Outputs of a head, and of a head of values if it has another size.
        interleaved
            Whether a fused layer has groups of queries, each followed by its key and its value, as in
            GPT-NeoX. Outputs are returned in the usual order: weights, of any format, and biases alike.
        make
            As in `ReplicatedLinear.load`.
        """
        sizes, world = (head_size, v_head_size or head_size), weights.process_group.size()
        if interleaved:
            parts = [_interleaved_part(weights, prefixes, heads, sizes)]
        else:
            parts = _qkv_parts(weights, prefixes, heads, sizes)
        loaded = load_linear(weights, parts, "N", make)
        layer = cls._from_loaded(weights, ", ".join(dict.fromkeys(part.prefix for part in parts)), loaded)
        kv = heads.keys or heads.queries or 1
        layer.head_size, layer.v_head_size = sizes
        layer.total_num_heads, layer.total_num_kv_heads = heads.queries or kv, kv
        layer.num_heads = layer.total_num_heads // world
        layer.num_kv_heads, layer.num_kv_head_replicas = max(kv // world, 1), max(world // kv, 1)
        layer.interleaved = interleaved
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> this rank's queries, keys and values, in this order."""
        y = super().forward(x)
        if not self.interleaved:
            return y
        queries = self.num_heads // self.num_kv_heads * self.head_size
        groups = y.reshape(*y.shape[:-1], self.num_kv_heads, -1)
        runs = torch.split(groups, [queries, self.head_size, self.v_head_size], -1)
        return torch.cat([run.flatten(-2) for run in runs], -1)

    def _output_shards(self) -> tuple[Shard, ...]:
        group, name, kv = self.process_group, self.prefix or "layer", self.total_num_kv_heads
        world, rank = group.size(), group.rank()
        self.num_heads = divide(name, "query heads", self.total_num_heads, group)
        if kv % world and world % kv:
            raise DivideError(name, "key and value heads", kv, f"{world} ranks, nor these into the heads")
        self.num_kv_heads, self.num_kv_head_replicas = max(kv // world, 1), max(world // kv, 1)
        index = rank // self.num_kv_head_replicas
        key, value = self.head_size, self.v_head_size
        return (
            Shard("q", self.total_num_heads * key, self.num_heads * key, rank),
            Shard("k", kv * key, self.num_kv_heads * key, index),
            Shard("v", kv * value, self.num_kv_heads * value, index),
        )


def _qkv_parts(
    weights: Weights, prefixes: Sequence[str] | str, heads: Heads, sizes: tuple[int, int]
) -> list[Part]:
    """Return the load of queries, keys and values with heads of these `sizes`, from three layers or one.

    ShapeError for a layer without these heads; DivideError if the ranks cannot share them.
    """
    queries, keys = _head_counts(heads)
    widths = (queries * sizes[0], keys * sizes[0], keys * sizes[1])
    is_fused = isinstance(prefixes, str)
    names = [str(prefixes)] * 3 if is_fused else list(prefixes)
    if len(names) != 3:
        raise ArgumentError("prefixes", "three of queries, keys and values, or a fused one", repr(prefixes))
    if is_fused:
        _check_outputs(weights, names[0], sum(widths), f"{queries} + {keys} + {keys} heads of {_text(sizes)}")
    else:
        head_sizes = (sizes[0], *sizes)
        for name, width, count, size in zip(names, widths, (queries, keys, keys), head_sizes, strict=True):
            _check_outputs(weights, name, width, f"{count} heads of {size}")
    parts = Heads(queries, keys).parts(list(zip(names, widths, strict=True)), weights.process_group.size())
    if not is_fused:
        return parts
    edges = (0, widths[0], widths[0] + widths[1], sum(widths))
    bounds = zip(parts, edges, edges[1:], strict=False)
    return [Part(names[0], start, stop, part.copies) for part, start, stop in bounds]


def _interleaved_part(
    weights: Weights, prefixes: Sequence[str] | str, heads: Heads, sizes: tuple[int, int]
) -> Part:
    """Check that ranks can share whole groups of heads; return the layer as one part."""
    queries, keys = _head_counts(heads)
    if not isinstance(prefixes, str):
        raise ArgumentError("prefixes", "one layer with interleaved heads", repr(prefixes))
    if queries % keys:
        raise ArgumentError("heads", "as many queries for each key", f"{queries} and {keys}")
    groups = f"{keys} groups of {queries // keys} + 1 + 1 heads of {_text(sizes)}"
    _check_outputs(weights, prefixes, queries * sizes[0] + keys * sum(sizes), groups)
    divide(prefixes, "key/value heads", keys, weights.process_group)
    return Part(prefixes)


def _head_counts(heads: Heads) -> tuple[int, int]:
    if heads.queries is None:
        raise ArgumentError("heads", "the number of queries too", f"queries=None, keys={heads.keys}")
    return heads.queries, heads.keys or heads.queries


def _check_outputs(weights: Weights, prefix: str, N: int, reason: str) -> None:
    """Raise ShapeError for a layer with another number of outputs."""
    shape = weights.loader.shape(weights, prefix)
    if shape[0] != N:
        raise ShapeError(prefix, f"({N}, {shape[1]}) = (N, K), as N is {reason}", shape)


def _text(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]}" if sizes[0] == sizes[1] else f"{sizes[0]}, of values {sizes[1]}"


class ParallelExperts(nn.Module):
    """Experts of a layer, shared among the ranks: the output is this rank's summand, or the sum.

    Parameters
    ----------
    experts
        Module (x, topk_ids, topk_weights) -> y of this rank's experts, as from `ExpertsWeight.get_linear`.
    collectives
        Ranks whose outputs are summed; None: no sum.
    """

    def __init__(self, experts: nn.Module, collectives: Collectives | None = None) -> None:
        super().__init__()
        self.experts: nn.Module = experts
        self.collectives: Collectives | None = collectives

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        *,
        split: ExpertSplit | None = "tensor",
        expert_ranks: int | None = None,
        facts: ExpertFacts | None = None,
        reduce_results: bool = False,
        make_experts: ExpertsFactory | None = None,
    ) -> Self:
        """Load this rank's share of the experts `prefix` of `weights`; errors as in `get_experts`.

        Parameters
        ----------
        weights, prefix, split, expert_ranks, facts
            As in `Weights.get_experts`.
        reduce_results
            Whether every rank returns the sum; False: its summand, for a caller that adds shared experts
            first.
        make_experts
            Returns the module of an `ExpertsWeight` and a function for the maximum over the ranks that split
            the same experts, or None; default: `ExpertsWeight.get_linear`.
        """
        ranks = collectives_of(weights.process_group) if reduce_results and split is not None else None
        loaded = weights.get_experts(prefix, split=split, expert_ranks=expert_ranks, facts=facts)
        maximum = maximum_for(loaded.down.layer, weights.process_group) if split == "tensor" else None
        if make_experts is not None:
            return cls(make_experts(loaded, maximum), ranks)
        dtype = weights.dtype if weights.dtype in DTYPES else None
        return cls(loaded.get_linear(maximum=maximum, dtype=dtype), ranks)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Apply experts `topk_ids` (T, k) to x (T, H), each times its `topk_weights`, in the dtype of x."""
        y: Tensor = self.experts(x, topk_ids, topk_weights)
        return y if self.collectives is None else self.collectives.summed(y)
