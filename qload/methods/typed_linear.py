"""One method for a linear layer of any format: tensors in, a typed weight, the kernel's order, the product.

    method.create_weights(layer, K, [N], K, N, torch.float16)
    ...                                           # load(param, tensor) for each parameter, whole tensors
    method.process_weights_after_loading(layer)   # layer.typed_linear is a qload.Linear from here on
    y = method.apply(layer, x, bias)

A checkpoint's tensors have the parameters' names behind the layer's prefix, dots but the last replaced by `_`
(`weight.absmax` is `weight_absmax`). Which of them a layer has, and so its format, its tensors tell.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qload.detect import Target, for_target
from qload.errors import ArgumentError, MissingTensorError, ShapeError
from qload.kernels.declared import Activations, Maximum
from qload.kernels.dtypes import DTYPES
from qload.loader import ConfiguredFormat, FormatLoader, Part, Split, TensorSource, WeightsLoader
from qload.loader.finite_scales import Nonfinite
from qload.methods.arrivals import Arrivals
from qload.methods.base import LinearMethodBase
from qload.methods.loaded import load_linear
from qload.methods.parameters import blank, check_loaded, full_name, register_weight
from qload.methods.placement import placement
from qload.methods.share_shapes import ParameterSlot, check_cuts, slots
from qload.methods.tags import put_tags_back
from qload.parallel import ALONE
from qload.spec import Weight, named
from qload.weights import Weights


class TypedLinearMethod(LinearMethodBase):
    """Loads a linear layer in whichever of its formats it is stored, and multiplies as `get_linear` does.

    Parameters
    ----------
    formats
        What the layer may be stored as.
    prefix
        The layer's name, for messages.
    target
        What the weight is repacked for, as in `loader_from_config`; None: as it is stored.
    activations
        "declared" or "unquantized", as in `Weight.get_linear`.
    nonfinite
        What becomes of scales that are NaN or infinite, as in `open_checkpoint`.
    logged
        What was logged of the checkpoint's layers, as `FormatLoader.logged`; None: nothing yet.
    """

    def __init__(
        self,
        formats: Sequence[ConfiguredFormat],
        prefix: str = "",
        *,
        target: Target | None = "auto",
        activations: Activations = "declared",
        nonfinite: Nonfinite = "error",
        logged: set[str] | None = None,
    ) -> None:
        self.formats = tuple(formats)
        self.prefix, self.target, self.activations = prefix, target, activations
        self.nonfinite: Nonfinite = nonfinite
        self.logged: set[str] = set() if logged is None else logged

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register a parameter for every tensor that the layer may have, in the shape of this rank's share.

        Their `weight_loader` takes a whole tensor of the checkpoint, with the id of its part where the layer
        is fused, and cuts it as the format declares. An engine's own loader (`extra_weight_attrs`) takes its
        place where the module tells no rank (`process_group`, or `tp_rank` and `tp_size`) and has a share.

        ArgumentError for sizes that are no share, and a layer that has such weights; CutError or DivideError,
        the same on every rank, where the format cannot be cut so.
        """
        sizes = (input_size_per_partition, output_partition_sizes)
        prefix = self.prefix or getattr(layer, "prefix", "")
        if hasattr(layer, "typed_arrivals"):
            raise ArgumentError(prefix or "layer", "a layer without weights", "one that has them")
        place = placement(layer, sizes, (output_size, input_size), prefix)
        foreign = _foreign_loader(layer, extra_weight_attrs)
        stored = [fmt for fmt in self.formats if _is_matrix(fmt)]
        check_cuts(next((fmt for fmt in stored if not fmt.weight_type.plain), stored[0]), place)
        found = slots(stored, place, params_dtype, by_tags=foreign is not None)
        arrivals = Arrivals(place, found)
        for slot in found.values():
            own = place.is_told or place.split is None or slot.shape is None or foreign is None
            shape = slot.shape or (0,) * len(slot.spec.axes)
            param = blank(shape, slot.dtype, shared=foreign is None)
            takes = partial(arrivals.take, slot.suffix)
            loader = partial(_take, takes) if own else foreign
            tags = {**extra_weight_attrs, **slot.tags(place), "takes": takes, "weight_loader": loader}
            register_weight(layer, slot.param_name, param, tags)
        layer.typed_arrivals = arrivals  # type: ignore[assignment]
        layer.params_dtype = params_dtype  # type: ignore[assignment]

    def load(
        self, layer: nn.Module, name: str, loaded_weight: Tensor, shard_id: int | str | None = None
    ) -> None:
        """Give `layer` the tensor that the checkpoint has as `name` behind the layer's prefix.

        `loaded_weight`: all of it; `shard_id`: of which part of a fused layer. MissingTensorError for a name
        that no format of the layer has.
        """
        slot: ParameterSlot | None = _arrivals(layer).slots.get(name)
        if slot is None:
            prefix, known = _arrivals(layer).place.prefix, _arrivals(layer).slots
            raise MissingTensorError(named(prefix, name), (named(prefix, name),), sorted(known))
        param = getattr(layer, slot.param_name)
        param.takes(param, loaded_weight, shard_id)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make the typed weight of what was loaded into `layer`, repack it, and drop the parameters.

        Parts that one weight cannot hold together are multiplied one after another. A second call does
        nothing. What is wrong with the tensors is said as by every load: of one that is missing a
        MissingTensorError, of a shape a ShapeError; a bias that was not loaded is a MismatchError.
        """
        if hasattr(layer, "typed_linear"):
            return
        put_tags_back(layer)
        check_loaded(layer)
        arrivals = _arrivals(layer)
        arrivals.find_written(layer)
        linear = self.loaded(layer)
        for slot in arrivals.slots.values():
            if slot.param_name in layer._parameters:
                delattr(layer, slot.param_name)
        arrivals.close()
        layer.typed_linear = linear

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x (..., K) -> (..., N), in x's dtype, by the weight of `layer`; `bias` (N,).

        ShapeError for a bias of another size; ArgumentError before `process_weights_after_loading`.
        """
        linear: nn.Module | None = getattr(layer, "typed_linear", None)
        if linear is None:
            first = "process_weights_after_loading before the first call"
            raise ArgumentError(full_name(layer, "weight"), first, "a call")
        N = sum(_arrivals(layer).place.parts)
        if bias is not None and tuple(bias.shape) != (N,):
            raise ShapeError(full_name(layer, "bias"), f"({N},) = (N,)", tuple(bias.shape))
        y: Tensor = linear(x, bias)
        return y

    def loaded(self, layer: Any, rows: tuple[int, int] | None = None) -> nn.Module:
        """What multiplies by the tensors that have arrived in a `layer`, in the order of the target's kernel.

        `rows`: the outputs [start, stop) that this rank has, where its share is no equal one; else None.
        """
        arrivals, stored = _arrivals(layer), FormatLoader(*self.formats)
        stored.logged = self.logged
        place, dtype = arrivals.place, layer.params_dtype
        options: dict[str, Any] = {
            "device": next(getattr(layer, slot.param_name).device for slot in arrivals.slots.values()),
            "dtype": dtype,
            "process_group": place.group if rows is None else ALONE,
            "nonfinite": self.nonfinite,
        }
        weights = Weights(arrivals, loader=for_target(stored, self.target), **options)
        alone = Weights(arrivals, loader=stored, **options)
        parts = [Part(place.prefix, *rows)] if rows is not None else _parts(weights, arrivals)
        split = place.split if rows is None else None

        def make(weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
            own: Maximum = "own" if place.split == "K" else None
            wanted = dtype if dtype in DTYPES else None
            return weight.get_linear(bias, activations=self.activations, maximum=own, dtype=wanted)

        def make_alone(weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
            return make(_repacked_alone(weight, alone, parts, self.target), bias, maximum)

        try:
            if not arrivals.is_share:
                return load_linear(weights, parts, split, make).linear
        except ArgumentError:
            if not arrivals.is_share:
                raise
        return load_linear(alone, parts, split, make_alone).linear


def _repacked_alone(
    weight: Weight, weights: TensorSource, parts: Sequence[Part], target: Target | None
) -> Weight:
    """A rank's share of the `parts` of a layer in the order of a `target`, which it alone decides by.

    Of a share that an engine cut, nobody here has what the other ranks have.
    """
    return for_target(_Loaded(weight), target).load(weights, parts, None)


class _Loaded(WeightsLoader):
    """What was loaded already."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """The weight, whatever is asked."""
        return self.weight

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """(N, K) of its share."""
        return self.weight.layer.N, self.weight.layer.K


def _parts(weights: Weights, arrivals: Arrivals) -> list[Part]:
    place, shape = arrivals.place, weights.loader.shape
    if arrivals.is_fused(place.prefix):
        return place.load_of_whole(shape(weights, place.prefix))
    return place.load_of_parts([shape(weights, name) for name in place.names])


def _take(takes: Any, param: nn.Parameter, loaded_weight: Tensor, shard_id: int | str | None = None) -> None:
    """The loader of a parameter: all of a tensor, of which it keeps this rank's share."""
    takes(param, loaded_weight, shard_id)


def _arrivals(layer: nn.Module) -> Arrivals:
    arrivals = getattr(layer, "typed_arrivals", None)
    if not isinstance(arrivals, Arrivals):
        raise ArgumentError("layer", "one whose weights were created", type(layer).__name__)
    return arrivals


def _foreign_loader(layer: nn.Module, attrs: Mapping[str, Any]) -> Any:
    """The loader that an engine brought, which cuts by tags; None where ours takes the whole tensor."""
    return None if hasattr(layer, "shards") else attrs.get("weight_loader")


def _is_matrix(fmt: ConfiguredFormat) -> bool:
    """Whether a format stores single layers, and no stacks of them."""
    return all(not suffix.startswith("_") for spec in fmt.specs() for suffix in spec.suffixes)
