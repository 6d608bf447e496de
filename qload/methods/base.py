"""Interfaces of quantization methods, the registry of their configs, and the method of plain layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, DtypeError, ShapeError, UnknownMethodError
from qload.methods.parameters import check_loaded, empty_parameter, full_name, register_weight, short_name


class QuantizeMethodBase(ABC):
    """Method by which one layer stores its weights and computes its output.

    An implementer promises that `apply` works after `process_weights_after_loading`, and raises an error
    before it instead of a wrong result.
    """

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: B027
        """Register the parameters of `layer`; the default registers none.

        `args` and `kwargs` depend on the kind of layer, see `LinearMethodBase`.
        """

    def process_weights_after_loading(self, layer: nn.Module) -> None:  # noqa: B027
        """Prepare the loaded parameters of `layer` for `apply`; the default does nothing."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output of `layer`; `args` and `kwargs` depend on the kind of layer."""


class LinearMethodBase(QuantizeMethodBase):
    """Method by which a linear layer stores its weights and multiplies.

    An implementer promises parameters whose attributes (`input_dim`, `output_dim`, `packed_dim`,
    `packed_factor`) tell a loader how to cut them, and an error for a parameter that was not loaded.
    """

    @abstractmethod
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
        """Register the parameters of this rank's share of a layer.

        Parameters
        ----------
        layer
            The module.
        input_size_per_partition
            This rank's inputs.
        output_partition_sizes
            This rank's outputs of each part of a fused layer.
        input_size
            Inputs of the whole layer.
        output_size
            Outputs of the whole layer.
        params_dtype
            Of the parameters with plain numbers.
        extra_weight_attrs
            Attributes of every parameter, such as `weight_loader`.
        """

    @abstractmethod
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) -> (..., N), in the dtype of x, by the weight of `layer`; `bias` (N,)."""


class QuantizationConfig(ABC):
    """Quantization of a checkpoint, with the method of each of its layers.

    An implementer promises that no GPU is needed to create it or to call it.
    """

    @classmethod
    @abstractmethod
    def get_name(cls) -> str:
        """Return the method's name in engines."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Create a config from `config`, a checkpoint's `quantization_config`."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str = "") -> QuantizeMethodBase | None:
        """Return the method of `layer`, named `prefix`; None for another kind of layer."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the supported dtypes of activations."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the lowest compute capability of a CUDA device, times 10; 0: any device."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the files of a checkpoint that may contain the config."""
        return ["quantize_config.json"]


Config = TypeVar("Config", bound=QuantizationConfig)

_CONFIGS: dict[str, type[QuantizationConfig]] = {}


def register_quantization(name: str) -> Callable[[type[Config]], type[Config]]:
    """Return a class decorator that registers a config as `name`; ArgumentError for a name in use."""

    if type(name) is not str or not name:
        raise ArgumentError("name", "a quantization method's name", repr(name))

    def register(config: type[Config]) -> type[Config]:
        if QuantizationConfig not in getattr(config, "__mro__", ()):
            raise ArgumentError("config", "a class of QuantizationConfig", repr(config))
        if name in _CONFIGS:
            owner = _CONFIGS[name].__qualname__
            raise ArgumentError("name", "a free name of a quantization method", f"{name!r}: {owner}")
        _CONFIGS[name] = config
        return config

    return register


def get_quantization_config(name: str) -> type[QuantizationConfig]:
    """Return the config class registered as `name`; UnknownMethodError, a KeyError, lists all names."""
    if type(name) is not str or name not in _CONFIGS:
        raise UnknownMethodError(name, tuple(list_quantization_methods()))
    return _CONFIGS[name]


def list_quantization_methods() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_CONFIGS)


def is_linear(layer: nn.Module) -> bool:
    """Return whether a module has the sizes of a linear layer, under qload's names or torch's.

    An integer of numpy is a size as well.
    """
    names = [("input_size", "output_size"), ("in_features", "out_features")]
    return any(all(isinstance(getattr(layer, name, None), Integral) for name in pair) for pair in names)


def check_bias(layer: nn.Module, bias: Tensor | None, N: int) -> None:
    """Raise ShapeError for a bias of another size than N."""
    if bias is not None and tuple(bias.shape) != (N,):
        raise ShapeError(full_name(layer, "bias"), f"({N},) = (N,)", tuple(bias.shape))


class UnquantizedLinearMethod(LinearMethodBase):
    """Method of a plain linear layer, with one parameter, `weight` (N, K) in `params_dtype`."""

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
        """Register `weight`, NaN until it is loaded."""
        weight = empty_parameter((sum(output_partition_sizes), input_size_per_partition), params_dtype)
        attrs = {"input_dim": 1, "output_dim": 0, "input_dim_whole": input_size}
        register_weight(layer, "weight", weight, attrs, extra_weight_attrs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Raise MismatchError if `layer` was not loaded."""
        check_loaded(layer, "weight")

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) -> (..., N), both in the dtype of the weight of `layer`; `bias` (N,).

        DtypeError for x in another dtype, ShapeError for x or a bias of another size.
        """
        weight: Tensor = layer.weight  # type: ignore[assignment]
        name, (N, K) = full_name(layer, "weight"), weight.shape
        if x.dtype != weight.dtype:
            raise DtypeError(f"{name}: x", [short_name(weight.dtype)], short_name(x.dtype))
        if x.ndim == 0 or x.shape[-1] != K:
            raise ShapeError(f"{name}: x", f"(..., {K}) = (..., K)", tuple(x.shape))
        check_bias(layer, bias, N)
        return nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
