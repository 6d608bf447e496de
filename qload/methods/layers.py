"""Linear layers of a tensor-parallel model: a rank's share of the weights, held by a quantization's method.

    layer = ColumnParallelLinear(K, N, quant_config=config, prefix="mlp.up_proj", process_group=group)
    layer.qweight.weight_loader(layer.qweight, tensor)           # and so for every parameter, by its name
    layer.quant_method.process_weights_after_loading(layer)
    y = layer(x)

    layer = RowParallelLinear.load(weights, "mlp.down_proj")     # or all of this at once, from `Weights`
    y = layer(x)

A layer that an engine made communicates nothing: outputs of a column-parallel layer are a share, those of a
row-parallel layer a summand, and the caller gathers or reduces. One that was loaded does so itself.
"""

from collections.abc import Callable
from typing import Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError
from qload.kernels.chips import uncast
from qload.loader import Heads, Part
from qload.methods.base import LinearMethodBase, QuantizationConfig
from qload.methods.loaded import LinearFactory, LoadedLinear, LoadedLinearMethod, equal_parts, load_linear
from qload.methods.parameters import blank_floats, fill, full_name, make_blank, register_weight
from qload.methods.shards import Shard, divided, load_inputs, load_outputs
from qload.methods.tags import Tagged
from qload.methods.unquantized import UnquantizedLinearMethod
from qload.parallel import ALONE, Collectives, ProcessGroup, Rank, collectives_of
from qload.weights import Weights


class Options(TypedDict, total=False):
    """What all linear layers take by keyword; see `LinearBase`."""

    params_dtype: torch.dtype | None
    quant_config: QuantizationConfig | None
    prefix: str
    process_group: ProcessGroup | None


class LinearBase(Tagged):
    """A layer (..., K) -> (..., N) whose `quant_method` registers, prepares and reads its parameters.

    Moving the module moves them; only plain weights follow a cast.

    Parameters
    ----------
    input_size, output_size
        K and N of the whole layer.
    bias
        Whether there is a parameter `bias`, of this rank's outputs.
    options
        By keyword, those that follow.
    params_dtype
        Of the parameters that hold plain numbers; None: torch's default dtype.
    quant_config
        What chooses the method; None, or a config that has none for this layer: plain weights. ArgumentError
        where the method is none for linear layers.
    prefix
        The layer's name in the checkpoint.
    process_group
        Anything with `rank()` and `size()`; None is a world of one.
    """

    bias: nn.Parameter | None
    collectives: Collectives | None = None  # by which a loaded layer gathers or sums; None: it does not

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
        self._create(bias)

    @classmethod
    def _around(cls, weights: Weights, prefix: str, loaded: LoadedLinear) -> Self:
        """A layer that multiplies by what was loaded for it, and has no parameters."""
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

    def _create(self, bias: bool) -> None:
        self.input_size_per_partition: int = self._inputs()
        self.shards: tuple[Shard, ...] = self._shards()
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
        own = blank_floats(self.output_size_per_partition, dtype=self.params_dtype)
        register_weight(self, "bias", own, {"output_dim": 0, "weight_loader": self.weight_loader})

    def _inputs(self) -> int:
        """This rank's inputs."""
        return self.input_size

    def _shards(self) -> tuple[Shard, ...]:
        """This rank's outputs, part by part."""
        return (Shard(0, self.output_size, self.output_size, 0),)

    def weight_loader(self, param: Tensor, loaded_weight: Tensor, shard_id: int | str | None = None) -> None:
        """Fill `param` with this rank's share of a checkpoint's tensor `loaded_weight`; here all of it.

        `shard_id`: which part of a fused layer the tensor is, ArgumentError where there is no such part.
        ShapeError, DtypeError or CastError where the tensor does not fit.
        """
        if self._taken(param, loaded_weight, shard_id):
            return
        self._no_shard(param, shard_id)
        fill(param.data, loaded_weight, self._name(param))

    def forward(self, x: Tensor) -> Tensor:
        """This rank's inputs x (..., K) -> its outputs (..., N), in x's dtype."""
        return self.quant_method.apply(self, x, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow a move, and a cast where weights are plain; memory that is new holds nothing yet."""
        before = {name for name, param in self.named_parameters(recurse=False) if param.is_meta}
        super()._apply(fn if isinstance(self.quant_method, UnquantizedLinearMethod) else uncast(fn), recurse)
        for name in before:
            if not getattr(self, name).is_meta:
                make_blank(getattr(self, name))
        return self

    def extra_repr(self) -> str:
        """This rank's sizes and the method."""
        sizes = f"in_features={self.input_size_per_partition}, out_features={self.output_size_per_partition}"
        rank = f"rank {self.process_group.rank()} of {self.process_group.size()}"
        bias = getattr(getattr(self, "typed_linear", self), "bias", None)
        return f"{sizes}, bias={bias is not None}, {rank}, {type(self.quant_method).__name__}"

    def _taken(self, param: Tensor, loaded: Tensor, shard_id: int | str | None) -> bool:
        """Whether the parameter's own method cuts the tensor, by the declaration of its format."""
        takes = getattr(param, "takes", None)
        if takes is not None:
            takes(param, loaded, shard_id)
        return takes is not None

    def _name(self, param: Tensor) -> str:
        own = (name for name, each in self.named_parameters(recurse=False) if each is param)
        return full_name(self, next(own, "parameter"))

    def _no_shard(self, param: Tensor, shard_id: int | str | None) -> None:
        if shard_id is not None:
            raise ArgumentError(
                f"{self._name(param)}: shard_id", "None, of a layer of one part", repr(shard_id)
            )


class ReplicatedLinear(LinearBase):
    """A layer that is whole on every rank."""

    @classmethod
    def load(cls, weights: Weights, prefix: str, *, make: LinearFactory | None = None) -> Self:
        """All of the layer that `weights` has under `prefix`, quantized as it is stored, with its bias.

        `make`: the module (..., K) -> (..., N) of a weight, its bias (N,) or None, and what finds a maximum
        over the ranks; None: `Weight.get_linear`.
        """
        return cls._around(weights, prefix, load_linear(weights, [Part(prefix)], None, make))


class ColumnParallelLinear(LinearBase):
    """A layer of which a rank has N / ranks of the outputs, and all inputs; DivideError for uneven shares."""

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
        """This rank's outputs of the layer that `weights` has under `prefix`, and of its bias.

        `heads`: of attention, of which each rank gets whole ones. `gather_output`: all ranks have all outputs
        (ArgumentError where some of them are on several ranks). `make`: as of `ReplicatedLinear.load`.
        """
        if heads is None:
            parts = equal_parts(weights, [prefix])
        else:
            N, _ = weights.loader.shape(weights, prefix)
            parts = heads.parts([(prefix, N)], weights.process_group.size())
        if gather_output and (len(parts) > 1 or parts[0].copies > 1):
            raise ArgumentError("gather_output", "False, as heads are fused or on several ranks", "True")
        ranks = collectives_of(weights.process_group) if gather_output else None
        layer = cls._around(weights, prefix, load_linear(weights, parts, "N", make))
        layer.collectives = ranks
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """X (..., K) -> this rank's outputs (..., N), or where they are gathered all; in x's dtype."""
        y = super().forward(x)
        return y if self.collectives is None else self.collectives.gathered(y)

    def _shards(self) -> tuple[Shard, ...]:
        group = self.process_group
        share = divided(self.prefix or "layer", "N", self.output_size, group)
        return (Shard(0, self.output_size, share, group.rank()),)

    def weight_loader(self, param: Tensor, loaded_weight: Tensor, shard_id: int | str | None = None) -> None:
        """Fill `param` with this rank's outputs of `loaded_weight`; `shard_id`: of which part."""
        if not self._taken(param, loaded_weight, shard_id):
            load_outputs(param, loaded_weight, self.shards, shard_id, self._name(param))


class RowParallelLinear(LinearBase):
    """A layer of which a rank has K / ranks of the inputs, and a summand of all outputs.

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
        """This rank's inputs of the layer that `weights` has under `prefix`; rank 0 has the bias.

        `reduce_results`: all ranks have the sum; False: each its summand. `make`: as of
        `ReplicatedLinear.load`. Inputs that are quantized by their largest are by that of all ranks.
        """
        ranks = collectives_of(weights.process_group) if reduce_results else None
        layer = cls._around(weights, prefix, load_linear(weights, [Part(prefix)], "K", make))
        layer.collectives = ranks
        return layer

    def _inputs(self) -> int:
        return divided(self.prefix or "layer", "K", self.input_size, self.process_group)

    def weight_loader(self, param: Tensor, loaded_weight: Tensor, shard_id: int | str | None = None) -> None:
        """Fill `param` with this rank's inputs of `loaded_weight`; `shard_id` has to be None."""
        if self._taken(param, loaded_weight, shard_id):
            return
        self._no_shard(param, shard_id)
        load_inputs(param, loaded_weight, self.process_group, self._name(param))

    def forward(self, x: Tensor) -> Tensor:
        """This rank's inputs x (..., K) -> (..., N) in x's dtype: a summand of the outputs, or their sum."""
        y = self.quant_method.apply(self, x, self.bias if self.process_group.rank() == 0 else None)
        return y if self.collectives is None else self.collectives.summed(y)


def is_linear(layer: nn.Module) -> bool:
    """Whether a module is a linear layer: one of ours, torch's, or one that says its sizes as they do."""
    if isinstance(layer, (LinearBase, nn.Linear)):
        return True
    sizes = [("input_size", "output_size"), ("in_features", "out_features")]
    return any(all(type(getattr(layer, name, None)) is int for name in pair) for pair in sizes)
