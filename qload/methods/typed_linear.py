"""One linear method for every format, and a quantization config for every method name.

    config = get_quantization_config("gptq").from_config(quantization_config)
    method = config.get_quant_method(layer, "model.layers.0.mlp.up_proj")
    method.create_weights(layer, K, [N], K, N, torch.float16)
    ...                                           # load(param, tensor) for each parameter, whole tensors
    method.process_weights_after_loading(layer)   # creates layer.typed_linear, a qload.Linear
    y = method.apply(layer, x, bias)

A parameter has the name of its tensor after the layer's prefix, with `_` for dots (`weight.absmax` is
`weight_absmax`). The loaded tensors decide the layer's format. `awq_marlin` has a config and a method of its
own, whose parameters have Marlin's names.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from qload.detect import Target, for_target, loader_from_config
from qload.detect.config_reader import described_formats
from qload.detect.methods import METHODS
from qload.errors import ArgumentError, ConfigError, MissingTensorError, check_type
from qload.kernels.declared import Activations, Maximum
from qload.kernels.dtypes import DTYPES
from qload.loader import (
    ConfiguredFormat,
    FormatLoader,
    ModuleLoader,
    Part,
    Split,
    TensorSource,
    WeightsLoader,
)
from qload.loader.layer_values import check_nonfinite
from qload.loader.source import Nonfinite
from qload.methods.awq_marlin import NAME as AWQ_MARLIN
from qload.methods.base import (
    LinearMethodBase,
    QuantizationConfig,
    UnquantizedLinearMethod,
    check_bias,
    is_linear,
    register_quantization,
)
from qload.methods.checkpoint_linear import load_linear
from qload.methods.parameter_buffer import (
    LayerShare,
    ParameterBuffer,
    check_cuts,
    matrix_formats,
    parameter_slots,
)
from qload.methods.parameters import (
    check_loaded,
    empty_parameter,
    full_name,
    register_weight,
    restore_attrs,
)
from qload.parallel import ALONE
from qload.spec import Weight, named
from qload.weights import Weights


class TypedLinearMethod(LinearMethodBase):
    """Method of a linear layer in any format, which multiplies as `Weight.get_linear` does.

    Parameters
    ----------
    formats
        Formats that the layer may be stored in.
    prefix
        Name of the layer, for messages.
    target
        Kernel that the weight is repacked for, as in `loader_from_config`; None: as stored.
    activations
        "declared" or "unquantized", as in `Weight.get_linear`.
    nonfinite
        Handling of scales that are NaN or infinite, as in `open_checkpoint`.
    logged
        Messages already logged about the checkpoint's layers, as `FormatLoader.logged`; None: none.
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

        Their `weight_loader` takes a whole tensor of the checkpoint, with the shard id of its part in a fused
        layer, and cuts it by the format's declaration. An engine's own loader (`extra_weight_attrs`) is kept
        for a share of a module that does not give its rank (`process_group`, or `tp_rank` and `tp_size`).

        ArgumentError for invalid sizes, and for a layer with such weights; CutError or DivideError, the same
        on every rank, if the format cannot be cut so.
        """
        prefix = self.prefix or getattr(layer, "prefix", "")
        if hasattr(layer, "parameter_buffer"):
            raise ArgumentError(prefix or "layer", "a layer without weights", "a layer with weights")
        sizes = (input_size_per_partition, output_partition_sizes)
        share = LayerShare.from_layer(layer, sizes, (output_size, input_size), prefix)
        engine_loader = None if hasattr(layer, "shards") else extra_weight_attrs.get("weight_loader")
        stored = matrix_formats(self.formats)
        check_cuts(stored, share)
        slots = parameter_slots(stored, share, params_dtype, by_attrs=engine_loader is not None)
        buffer = ParameterBuffer(share, slots)
        for slot in slots.values():
            is_cut_by_engine = not (share.has_rank or share.split is None or slot.shape is None)
            shape = slot.shape or (0,) * len(slot.spec.axes)
            param = empty_parameter(shape, slot.dtype, expanded=engine_loader is None)
            load = partial(buffer.load, slot.suffix)
            loader = engine_loader if is_cut_by_engine and engine_loader is not None else load
            attrs = {
                **extra_weight_attrs,
                **slot.attrs(share),
                "buffer_loader": load,
                "weight_loader": loader,
            }
            register_weight(layer, slot.param_name, param, attrs)
        layer.parameter_buffer = buffer  # type: ignore[assignment]
        layer.params_dtype = params_dtype  # type: ignore[assignment]

    def load(
        self, layer: nn.Module, name: str, loaded_weight: Tensor, shard_id: int | str | None = None
    ) -> None:
        """Load the tensor `name`, without the layer's prefix, into `layer`.

        `loaded_weight`: the whole tensor; `shard_id`: its part of a fused layer. MissingTensorError for a
        name that no format of the layer has.
        """
        buffer = _buffer_of(layer)
        slot = buffer.slots.get(name)
        if slot is None:
            tensor = named(buffer.layer.prefix, name)
            raise MissingTensorError(tensor, (tensor,), sorted(buffer.slots))
        param = getattr(layer, slot.param_name)
        param.buffer_loader(param, loaded_weight, shard_id)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Create `layer.typed_linear` from the tensors loaded into `layer`, and drop the parameters.

        Parts that do not fit into one weight are multiplied one after another. A second call does nothing.
        Errors are those of a load: MissingTensorError for a missing tensor, ShapeError for a wrong shape;
        MismatchError for a bias that was not loaded.
        """
        if hasattr(layer, "typed_linear"):
            return
        restore_attrs(layer)
        check_loaded(layer)
        _buffer_of(layer).add_written(layer)
        self.finish(layer)

    def finish(self, layer: Any, rows: tuple[int, int] | None = None) -> None:
        """Create `layer.typed_linear`, and remove the loaded parameters.

        `rows`: this rank's outputs [start, stop), for unequal shares. A second call does nothing.
        """
        if hasattr(layer, "typed_linear"):
            return
        buffer = _buffer_of(layer)
        names = [slot.param_name for slot in buffer.slots.values() if hasattr(layer, slot.param_name)]
        linear = self._linear(buffer, getattr(layer, names[0]).device, layer.params_dtype, rows)
        for name in names:
            delattr(layer, name)
        buffer.close()
        layer.typed_linear = linear

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) -> (..., N), in the dtype of x, by the weight of `layer`; `bias` (N,).

        ShapeError for a bias of another size; ArgumentError before `process_weights_after_loading`.
        """
        linear: nn.Module | None = getattr(layer, "typed_linear", None)
        if linear is None:
            first = "process_weights_after_loading before the first call"
            raise ArgumentError(full_name(layer, "weight"), first, "a call")
        check_bias(layer, bias, sum(_buffer_of(layer).layer.parts))
        y: Tensor = linear(x, bias)
        return y

    def _linear(
        self, buffer: ParameterBuffer, device: torch.device, dtype: Any, rows: tuple[int, int] | None
    ) -> nn.Module:
        """Return a module that multiplies by the tensors of a buffer, repacked for the target's kernel."""
        stored, share = FormatLoader(*self.formats), buffer.layer
        stored.logged = self.logged
        options: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "process_group": share.group if rows is None else ALONE,
            "nonfinite": self.nonfinite,
        }
        weights = Weights(buffer, loader=for_target(stored, self.target), **options)
        if rows is None:
            parts = buffer.load_parts(partial(weights.loader.shape, weights))
        else:
            parts = [Part(share.prefix, *rows)]
        split = share.split if rows is None else None

        def make(weight: Weight, bias: Tensor | None, _: Maximum) -> nn.Module:
            maximum: Maximum = "own" if share.split == "K" else None
            act_dtype = dtype if dtype in DTYPES else None
            return weight.get_linear(bias, activations=self.activations, maximum=maximum, dtype=act_dtype)

        def make_repacked(weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
            return make(for_target(_LoadedShare(weight), self.target).load(local, parts, None), bias, maximum)

        try:
            if not buffer.is_partial:
                return load_linear(weights, parts, split, make).linear
        except ArgumentError:
            if not buffer.is_partial:
                raise
        # An engine has cut the tensors: this rank's share is repacked without those of other ranks.
        local = Weights(buffer, loader=stored, **options)
        return load_linear(local, parts, split, make_repacked).linear


class _LoadedShare(WeightsLoader):
    """Loader of a weight that is already loaded."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """Return the weight."""
        return self.weight

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """Return (N, K) of the share."""
        return self.weight.layer.N, self.weight.layer.K


def _buffer_of(layer: nn.Module) -> ParameterBuffer:
    buffer = getattr(layer, "parameter_buffer", None)
    if not isinstance(buffer, ParameterBuffer):
        raise ArgumentError("layer", "a layer after create_weights", type(layer).__name__)
    return buffer


class CheckpointConfig(QuantizationConfig):
    """Quantization of a checkpoint, by its own config; created without a GPU.

    `from_config` creates one. `target`, `activations` and `nonfinite` may be set before layers are created.

    Parameters
    ----------
    loader
        Loader of the checkpoint's layers, from `loader_from_config` without a target.
    target
        Kernel that weights are repacked for, as in `loader_from_config`; None: as stored.
    activations
        "declared" or "unquantized", as in `Weight.get_linear`.
    nonfinite
        Handling of scales that are NaN or infinite, as in `open_checkpoint`.
    """

    name: ClassVar[str] = ""

    def __init__(
        self,
        loader: FormatLoader,
        target: Target | None = "auto",
        activations: Activations = "declared",
        nonfinite: Nonfinite = "error",
    ) -> None:
        check_type("loader", loader, FormatLoader)
        check_nonfinite(nonfinite)
        self.loader, self.target, self.activations = loader, target, activations
        self.nonfinite: Nonfinite = nonfinite

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader!r}, target={self.target!r})"

    @classmethod
    def get_name(cls) -> str:
        """Return the `quant_method`."""
        return cls.name

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the files of a checkpoint that may contain a config."""
        return ["quantize_config.json", "quant_config.json", "hf_quant_config.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Create a config from `config`, a checkpoint's `quantization_config`; `quant_method` is optional.

        ConfigError for a malformed config or one of another method, UnsupportedFormatError for an unsupported
        variant.
        """
        if not isinstance(config, Mapping):
            raise ConfigError("config", "quantization_config", "an object", type(config).__name__)
        values = dict(config)
        own_file = values.get("quantization")
        if isinstance(own_file, Mapping) and cls.name == "modelopt":  # hf_quant_config.json
            values = dict(own_file)
        # A config of compressed-tensors with `config_groups` need not name its method.
        if all(values.get(key) is None for key in ("quant_method", "method", "config_groups")):
            values["quant_method"] = cls.name
        loader = loader_from_config(values)
        types = [fmt.weight_type for fmt in loader.formats if not fmt.weight_type.plain]
        read = described_formats(cls.name)
        other = next((weight_type for weight_type in types if weight_type not in read), None)
        if other is not None:
            got = f"{values.get('quant_method', values.get('method'))!r}, of {other.format} layers"
            raise ConfigError("config", "quantization_config.quant_method", cls.name, got)
        return cls(loader)

    def get_quant_method(self, layer: nn.Module, prefix: str = "") -> LinearMethodBase | None:
        """Return a `TypedLinearMethod` for a linear layer, a plain method for an excluded one, else None.

        `prefix`: the name of `layer`, else ArgumentError. MismatchError for a fused layer with different
        settings for its parts.
        """
        if not is_linear(layer):
            return None
        if not isinstance(prefix, str):
            raise ArgumentError("prefix", "a layer's name", repr(prefix))
        if self.loader.left_out(prefix) is not None:
            return UnquantizedLinearMethod()
        loader = self.loader.chosen(prefix) if isinstance(self.loader, ModuleLoader) else self.loader
        return TypedLinearMethod(
            loader.formats,
            prefix,
            target=self.target,
            activations=self.activations,
            nonfinite=self.nonfinite,
            logged=self.loader.logged,
        )


def _config_class(name: str) -> type[CheckpointConfig]:
    """Create the class of a method name: GptqMarlinConfig for `gptq_marlin`."""
    words = name.replace("-", "_").split("_")
    doc = f"`{name}`: {CheckpointConfig.__doc__}"
    attributes = {"name": name, "__doc__": doc, "__module__": __name__}
    return type(f"{''.join(word.capitalize() for word in words)}Config", (CheckpointConfig,), attributes)


for _name in METHODS:
    if _name != AWQ_MARLIN:
        register_quantization(_name)(_config_class(_name))
