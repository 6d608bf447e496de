"""Quantization methods by name, as an engine asks for them."""

from collections.abc import Callable
from typing import TypeVar

from qload.errors import ArgumentError, UnknownMethodError
from qload.methods.base import QuantizationConfig

Config = TypeVar("Config", bound=QuantizationConfig)

_METHODS: dict[str, type[QuantizationConfig]] = {}


def register_quantization(name: str) -> Callable[[type[Config]], type[Config]]:
    """A class decorator: `name` means this config from here on; ArgumentError where it is taken or none."""

    if type(name) is not str or not name:
        raise ArgumentError("name", "a quantization method's name", repr(name))

    def register(config: type[Config]) -> type[Config]:
        if QuantizationConfig not in getattr(config, "__mro__", ()):
            raise ArgumentError("config", "a class of QuantizationConfig", repr(config))
        if name in _METHODS:
            holder = _METHODS[name].__qualname__
            raise ArgumentError("name", "a quantization method's name that is free", f"{name!r}: {holder}")
        _METHODS[name] = config
        return config

    return register


def get_quantization_config(name: str) -> type[QuantizationConfig]:
    """The config class registered under `name`; UnknownMethodError, a KeyError, lists those there are."""
    if type(name) is not str or name not in _METHODS:
        raise UnknownMethodError(name, tuple(list_quantization_methods()))
    return _METHODS[name]


def list_quantization_methods() -> list[str]:
    """The registered names, sorted."""
    return sorted(_METHODS)
