"""vLLM's quantization config for `--quantization qload`, and the choice of each layer's method."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from qload.detect import loader_from_config
from qload.engines.vllm.checkpoint import PLAIN_SUFFIXES, CheckpointNames, section_and_settings
from qload.engines.vllm.hooks import LAYERS, LOADING_HOOKS, check_hooks, hook
from qload.errors import UnsupportedFormatError
from qload.loader import FormatLoader, ModuleLoader
from qload.methods import CheckpointConfig, TypedLinearMethod

CONFIG_FILES = ["quantize_config.json", "quant_config.json", "hf_quant_config.json"]


class QloadQuantizationConfig(QuantizationConfig):
    """Quantization config of a checkpoint of any format that qload reads.

    Parameters
    ----------
    loader
        Loader of its layers.
    settings
        `target`, `activations` and `nonfinite` of `qload.methods.CheckpointConfig`, other than the defaults.
    """

    def __init__(self, loader: FormatLoader, **settings: Any) -> None:
        super().__init__()
        self.methods = CheckpointConfig(loader, **settings)
        self.names = CheckpointNames()
        self._embedded: set[str] = set()  # embeddings with a method

    def __repr__(self) -> str:
        return f"QloadQuantizationConfig({self.methods.loader!r})"

    def get_name(self) -> str:
        """Return the value of `--quantization`."""
        return "qload"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that every format supports."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0: any device is supported."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the files of a checkpoint that may contain a quantization config."""
        return CONFIG_FILES

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Create a config from `config`, a checkpoint's `quantization_config` or a tool's own file.

        `--hf-overrides` may add a key `qload`: {"target": ..., "activations": ..., "nonfinite": ...}, as in
        `qload.methods.CheckpointConfig`. ConfigError and UnsupportedFormatError as in
        `qload.loader_from_config`; ArgumentError if this vLLM lacks a required name.
        """
        check_hooks(LOADING_HOOKS)
        values, settings = section_and_settings(config)
        return cls(loader_from_config(values), **settings)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return "qload" if `user_quant` is "qload", for any `hf_quant_cfg`."""
        return "qload" if user_quant == "qload" else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Store `model_name` and `revision`, for a later read of the files."""
        self.names = CheckpointNames(model_name, revision)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Add `hf_to_vllm_mapper`, vLLM's renaming of the checkpoint's tensors."""
        self.names.add_mapper(hf_to_vllm_mapper)

    def get_checkpoint_weight_mapper(self) -> Any:
        """Return a mapper from suffixes with dots to names of parameters.

        vLLM calls this once the model is built: UnsupportedFormatError, before a tensor is read, for
        quantized embeddings that are plain in the model; UnreadTensorsError for tensors that no format reads.
        """
        self.names.check_all_read(self.methods.loader)
        plain = [module for module in self._quantized_embeddings() if module not in self._embedded]
        if plain and hook("vllm.distributed.parallel_state", "get_pp_group")().is_first_rank:
            raise UnsupportedFormatError(plain[0], "it is quantized, and vLLM's model has plain embeddings")
        dotted = sorted(suffix for suffix in self._quantized_suffixes() if "." in suffix)
        renamed = {f".{suffix}": f".{suffix.replace('.', '_')}" for suffix in dotted}
        return hook("vllm.model_executor.models.utils", "WeightsMapper")(orig_to_new_suffix=renamed)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a linear layer, head, embedding or experts `prefix`; None for others."""
        if isinstance(layer, hook(f"{LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding")):
            return self._vocabulary_method(layer, prefix)
        if isinstance(layer, hook(f"{LAYERS}.fused_moe", "RoutedExperts")):
            return self._experts_method(layer, prefix)
        if not isinstance(layer, hook(f"{LAYERS}.linear", "LinearBase")):
            return None
        typed = self._linear_method(layer, prefix)
        if typed is None:
            return hook(f"{LAYERS}.linear", "UnquantizedLinearMethod")()
        from qload.engines.vllm.methods import QloadLinearMethod

        return QloadLinearMethod(typed, self.names)

    def _vocabulary_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from qload.engines.vllm.methods import PlainHeadMethod, QloadEmbeddingMethod, QloadHeadMethod

        is_head = isinstance(layer, hook(f"{LAYERS}.vocab_parallel_embedding", "ParallelLMHead"))
        embeddings = self._quantized_embeddings()
        if (
            not (prefix or is_head) and len(embeddings) == 1
        ):  # models such as Llama do not name their embeddings
            prefix = embeddings[0]
        is_plain = self.names.is_plain(prefix) or not (is_head or self.names.suffixes(prefix))
        typed = None if is_plain else self._linear_method(layer, prefix)
        if is_head:
            return PlainHeadMethod() if typed is None else QloadHeadMethod(typed, self.names)
        if typed is None:
            return None
        self._embedded.add(prefix)
        return QloadEmbeddingMethod(typed, self.names)

    def _experts_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        from qload.engines.vllm.methods import QloadExpertsMethod
        from qload.engines.vllm.weight_loading import check_parallelism

        loader = self.methods.loader
        matrix = f"{self.names.stored_module(f'{prefix}.0')}.{layer.ckpt_gate_proj_name}"
        for name in sorted(self.names.under(f"{prefix}.0."))[:1]:  # spelled as stored
            matrix = self.names.stored_module(".".join(name.split(".")[: prefix.count(".") + 3]))
        if loader.left_out(matrix) is not None:
            return None
        check_parallelism(prefix, layer.moe_config)
        formats = (loader.chosen(matrix) if isinstance(loader, ModuleLoader) else loader).formats
        return QloadExpertsMethod(layer.moe_config, formats, self.names, self.methods)

    def _linear_method(self, layer: nn.Module, prefix: str) -> TypedLinearMethod | None:
        """Return qload's method of a layer; None if the config excludes it."""
        method = self.methods.get_quant_method(layer, self._stored_name(prefix))
        if not isinstance(method, TypedLinearMethod):
            return None
        method.prefix = prefix
        return method

    def _quantized_suffixes(self) -> set[str]:
        """Suffixes of the tensors of quantized layers, except weight and bias."""
        formats = (fmt for fmt in self.methods.loader.formats if not fmt.weight_type.plain)
        suffixes = {suffix for fmt in formats for suffix in fmt.suffixes}
        return suffixes - PLAIN_SUFFIXES

    def _quantized_embeddings(self) -> list[str]:
        return self.names.embeddings(self._quantized_suffixes())

    def _stored_name(self, prefix: str) -> str:
        """Return the stored name of a layer; for a merged layer, by its parts."""
        parent, _, last = prefix.rpartition(".")
        for part in (last, *self.packed_modules_mapping.get(last, ())):
            name = f"{parent}.{part}" if parent else part
            stored = self.names.stored_module(name)
            if stored != name:
                return f"{stored.removesuffix(part)}{last}"
        return prefix
