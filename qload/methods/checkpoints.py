"""Every quantization that qload reads, under the name that engines have for it.

    config = get_quantization_config("gptq").from_config(quantization_config)

The config is the checkpoint's own JSON, whose claims qload reads as it does from files; a layer's format its
tensors tell. `awq_marlin` has a config and a method of its own, whose parameters keep Marlin's names.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import nn

from qload.detect import Target, loader_from_config
from qload.detect.config_reader import METHODS, described_formats
from qload.errors import ArgumentError, ConfigError, check_type
from qload.kernels.declared import Activations
from qload.loader import FormatLoader, ModuleLoader
from qload.loader.finite_scales import Nonfinite, check_nonfinite
from qload.methods.awq_marlin import NAME as SPECIAL
from qload.methods.base import LinearMethodBase, QuantizationConfig
from qload.methods.layers import is_linear
from qload.methods.registry import register_quantization
from qload.methods.typed_linear import TypedLinearMethod
from qload.methods.unquantized import UnquantizedLinearMethod


class CheckpointConfig(QuantizationConfig):
    """A checkpoint's quantization, as its own config says it; making one needs no GPU.

    `from_config` makes one. What the weights are repacked for, and whether inputs are quantized as the
    checkpoint declares, may be set before layers are made.

    Parameters
    ----------
    loader
        What reads such layers, as `loader_from_config` makes it without a target.
    target
        What weights are repacked for, as in `loader_from_config`; None: they stay as they are stored.
    activations
        "declared" or "unquantized", as in `Weight.get_linear`.
    nonfinite
        What becomes of scales that are NaN or infinite, as in `open_checkpoint`.
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
        """The `quant_method` that an engine asks by."""
        return cls.name

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Every format is multiplied in these."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_config_filenames() -> list[str]:
        """The files beside the weights in which a config may stand."""
        return ["quantize_config.json", "quant_config.json", "hf_quant_config.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From `config`, a checkpoint's `quantization_config`; without `quant_method` it is this one's.

        ConfigError for one that is malformed or of another method, UnsupportedFormatError for a variant that
        is not read.
        """
        if not isinstance(config, Mapping):
            raise ConfigError("config", "quantization_config", "an object", type(config).__name__)
        values = dict(config)
        own_file = values.get("quantization")
        if isinstance(own_file, Mapping) and cls.name == "modelopt":  # as in hf_quant_config.json
            values = dict(own_file)
        told = ("quant_method", "method", "config_groups")  # the last as in configs that name no method
        if all(values.get(key) is None for key in told):
            values["quant_method"] = cls.name
        loader = loader_from_config(values)
        kinds = [fmt.weight_type for fmt in loader.formats if not fmt.weight_type.plain]
        other = next((kind for kind in kinds if kind not in described_formats(cls.name)), None)
        if other is not None:
            got = f"{values.get('quant_method', values.get('method'))!r}, of {other.format} layers"
            raise ConfigError("config", "quantization_config.quant_method", cls.name, got)
        return cls(loader)

    def get_quant_method(self, layer: nn.Module, prefix: str = "") -> LinearMethodBase | None:
        """A `TypedLinearMethod` for a linear layer, a plain one for those left out, None for other modules.

        `prefix`: the name of `layer`, ArgumentError where it is none; MismatchError for a fused layer whose
        parts the config does not mean alike.
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


def _config(name: str) -> type[CheckpointConfig]:
    """The class of one name: `gptq_marlin` has GptqMarlinConfig."""
    words = name.replace("-", "_").split("_")
    said = {"name": name, "__doc__": f"`{name}`: {CheckpointConfig.__doc__}", "__module__": __name__}
    return type(f"{''.join(word.capitalize() for word in words)}Config", (CheckpointConfig,), said)


for _name in METHODS:
    if _name != SPECIAL:
        register_quantization(_name)(_config(_name))
