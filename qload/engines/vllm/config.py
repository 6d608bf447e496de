"""`--quantization qload`: a checkpoint's config as qload reads it, and the method of each layer."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from qload.detect import loader_from_config
from qload.engines.vllm.checkpoint import PLAIN, CheckpointNames, section_and_settings
from qload.engines.vllm.hooks import LAYERS, TO_LOAD, check_hooks, hook
from qload.errors import UnsupportedFormatError
from qload.loader import ConfiguredFormat, FormatLoader, ModuleLoader
from qload.methods import CheckpointConfig, TypedLinearMethod

FILES = ["quantize_config.json", "quant_config.json", "hf_quant_config.json"]


class QloadQuantizationConfig(QuantizationConfig):
    """A checkpoint's quantization, whichever it is.

    Parameters
    ----------
    loader
        What reads its layers.
    settings
        `target`, `activations` and `nonfinite` of `qload.methods.CheckpointConfig`, where they are not the
        default.
    """

    def __init__(self, loader: FormatLoader, **settings: Any) -> None:
        super().__init__()
        self.methods = CheckpointConfig(loader, **settings)
        self.names = CheckpointNames()
        self._embedded: set[str] = set()  # the embeddings that have a method

    def __repr__(self) -> str:
        return f"QloadQuantizationConfig({self.methods.loader!r})"

    def get_name(self) -> str:
        """The name after `--quantization`."""
        return "qload"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Every format is multiplied in these."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any device."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """The files beside the weights in which a config may stand."""
        return FILES

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From `config`, a checkpoint's `quantization_config`, to which `--hf-overrides` may add a `qload`.

        Or what a tool's own file has, which vLLM reads where `config.json` says nothing.

        `qload`: {"target": ..., "activations": ..., "nonfinite": ...}, those of
        `qload.methods.CheckpointConfig`. ConfigError and UnsupportedFormatError as of
        `qload.loader_from_config`; ArgumentError where vLLM lacks what it takes.
        """
        check_hooks(TO_LOAD)
        values, settings = section_and_settings(config)
        return cls(loader_from_config(values), **settings)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take over a checkpoint where `user_quant` says so, whatever `hf_quant_cfg` says."""
        return "qload" if user_quant == "qload" else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Learn from `model_name` and `revision` where the files are; nothing is read before it is needed."""
        self.names = CheckpointNames(model_name, revision)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Learn how `hf_to_vllm_mapper` renames what the checkpoint names."""
        self.names.add(hf_to_vllm_mapper)

    def get_checkpoint_weight_mapper(self) -> Any:
        """Names with dots become those of parameters, and no tensor is dropped.

        vLLM asks for it once the model is built: UnsupportedFormatError, before a tensor is read, for
        quantized embeddings of which the model has plain ones; UnreadTensorsError for tensors in a form that
        no format reads.
        """
        self.names.check_all_read(self.methods.loader)
        missed = [module for module in self._embeddings() if module not in self._embedded]
        if missed and hook("vllm.distributed.parallel_state", "get_pp_group")().is_first_rank:
            raise UnsupportedFormatError(missed[0], "it is quantized, and vLLM's model has plain embeddings")
        dotted = {suffix for suffix in self._suffixes() if "." in suffix}
        renamed = {f".{suffix}": f".{suffix.replace('.', '_')}" for suffix in sorted(dotted)}
        return hook("vllm.model_executor.models.utils", "WeightsMapper")(orig_to_new_suffix=renamed)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a linear layer, a head, quantized embeddings or experts; None for all other modules.

        `prefix`: the name of `layer`.
        """
        if isinstance(layer, hook(f"{LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding")):
            return self._of_vocabulary(layer, prefix)
        if isinstance(layer, hook(f"{LAYERS}.fused_moe", "RoutedExperts")):
            return self._of_experts(layer, prefix)
        if not isinstance(layer, hook(f"{LAYERS}.linear", "LinearBase")):
            return None
        typed = self._typed(layer, prefix)
        if typed is None:
            return hook(f"{LAYERS}.linear", "UnquantizedLinearMethod")()
        from qload.engines.vllm.methods import QloadLinearMethod

        return QloadLinearMethod(typed, self.names)

    def _of_vocabulary(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from qload.engines.vllm.methods import PlainHeadMethod, QloadEmbeddingMethod, QloadHeadMethod

        is_head = isinstance(layer, hook(f"{LAYERS}.vocab_parallel_embedding", "ParallelLMHead"))
        stored = self._embeddings()
        if not (prefix or is_head) and len(stored) == 1:  # models such as Llama name no embeddings
            prefix = stored[0]
        is_plain = self.names.is_plain(prefix) or not (is_head or self.names.suffixes(prefix))
        typed = None if is_plain else self._typed(layer, prefix)
        if is_head:
            return PlainHeadMethod() if typed is None else QloadHeadMethod(typed, self.names)
        if typed is None:
            return None
        self._embedded.add(prefix)
        return QloadEmbeddingMethod(typed, self.names)

    def _of_experts(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        from qload.engines.vllm.methods import QloadExpertsMethod
        from qload.engines.vllm.weight_loading import check_ranks

        loader = self.methods.loader
        one = f"{self.names.stored(f'{prefix}.0')}.{layer.ckpt_gate_proj_name}"
        for stored in sorted(self.names.under(f"{prefix}.0."))[:1]:  # as it spells them
            one = self.names.stored(".".join(stored.split(".")[: prefix.count(".") + 3]))
        if loader.left_out(one) is not None:
            return None
        check_ranks(prefix, layer.moe_config)
        formats = self._formats(one)
        return QloadExpertsMethod(
            layer.moe_config,
            formats,
            self.names,
            target=self.methods.target,
            activations=self.methods.activations,
            nonfinite=self.methods.nonfinite,
            logged=loader.logged,
        )

    def _typed(self, layer: nn.Module, prefix: str) -> TypedLinearMethod | None:
        """The method of a layer that the config does not leave out."""
        found = self.methods.get_quant_method(layer, self._name(prefix))
        if not isinstance(found, TypedLinearMethod):
            return None
        found.prefix = prefix
        return found

    def _formats(self, prefix: str) -> tuple[ConfiguredFormat, ...]:
        loader = self.methods.loader
        return (loader.chosen(prefix) if isinstance(loader, ModuleLoader) else loader).formats

    def _suffixes(self) -> set[str]:
        """What the tensors of quantized layers may be called, other than weight and bias."""
        formats = (fmt for fmt in self.methods.loader.formats if not fmt.weight_type.plain)
        return {each for fmt in formats for spec in fmt.specs() for each in spec.suffixes} - PLAIN

    def _embeddings(self) -> list[str]:
        """The embeddings that are stored quantized."""
        return self.names.embeddings(self._suffixes())

    def _name(self, prefix: str) -> str:
        """What the checkpoint calls a layer: by its parts, where vLLM merges several."""
        lead, _, last = prefix.rpartition(".")
        for part in (last, *self.packed_modules_mapping.get(last, ())):
            name = f"{lead}.{part}" if lead else part
            stored = self.names.stored(name)
            if stored != name:
                return f"{stored.removesuffix(part)}{last}"
        return prefix
