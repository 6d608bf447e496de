"""The classes and functions of vLLM that the plug-in uses, as modules for tests without vLLM.

    with installed() as plugin:
        config = plugin.config.QloadQuantizationConfig.from_config(section)

Base classes have the abstract methods, and layers the attributes, of vLLM 0.33; the session `vllm` runs the
real ones.
"""

import enum
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

PLUGIN = ("config", "kernel", "methods")  # modules of qload.engines.vllm that import vLLM
SIZES = {"tp_rank": 0, "tp_size": 1, "dp_size": 1, "pcp_size": 1, "sp_size": 1, "ep_size": 1}
PARALLEL = {**SIZES, "use_ep": False, "enable_eplb": False, "all2all_backend": "allgather_reducescatter"}


class QuantizeMethodBase(ABC):
    @abstractmethod
    def create_weights(self, layer: nn.Module, *sizes: Any, **attrs: Any) -> None: ...

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **options: Any) -> Tensor: ...


class LinearMethodBase(QuantizeMethodBase):
    pass


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.moe = moe

    @abstractmethod
    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any: ...


class UnquantizedLinearMethod(LinearMethodBase):
    create_weights = apply = None  # type: ignore[assignment]


class UnquantizedEmbeddingMethod(QuantizeMethodBase):
    create_weights = None  # type: ignore[assignment]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return nn.functional.linear(x, layer.weight, bias)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        layer.weight = embed_tokens.weight
        return layer


class QuantizationConfig(ABC):
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self) -> str: ...

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]: ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int: ...

    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]: ...

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> Any: ...

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any: ...


class LinearBase(nn.Module):
    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.tp_rank, self.tp_size = 0, 1


class VocabParallelEmbedding(nn.Module):
    """Rows [start, stop) of a vocabulary, padded to `num_embeddings_per_partition`."""

    def __init__(self, vocab_size: int, embedding_dim: int, rows: tuple[int, int], padded: int) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = int(rows[0] > 0), 1 + (rows[1] - rows[0] < vocab_size)
        self.embedding_dim, self.org_vocab_size = embedding_dim, vocab_size
        self.num_embeddings_per_partition = padded
        self.input_size, self.output_size = embedding_dim, padded * self.tp_size
        self.shard_indices = SimpleNamespace(org_vocab_start_index=rows[0], org_vocab_end_index=rows[1])


class ParallelLMHead(VocabParallelEmbedding):
    pass


class RoutedExperts(nn.Module):
    """Experts `local` of a layer, by their numbers in the layer."""

    def __init__(self, layer_name: str, local: list[int], expert_map: Tensor | None, **parallel: Any) -> None:
        super().__init__()
        self.layer_name, self.local, self.expert_map = layer_name, local, expert_map
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = "w1", "w3", "w2"
        self.activation = SimpleNamespace(value="silu")
        self.swiglu_limit = self.swiglu_alpha = None
        self.apply_router_weight_on_input = False
        sizes = SimpleNamespace(**{**PARALLEL, **parallel})
        self.moe_config = SimpleNamespace(moe_parallel_config=sizes, is_lora_enabled=False)

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return self.local.index(expert) if expert in self.local else -1


@dataclass
class WeightsMapper:
    orig_to_new_suffix: Mapping[str, str | None] = field(default_factory=dict)


class MPLinearKernel(ABC):
    def __init__(self, c: Any, w_q_param_name: str, w_s_param_name: str, w_zp_param_name: str | None) -> None:
        self.config, self.w_q_name, self.w_s_name = c, w_q_param_name, w_s_param_name
        self.w_zp_name = w_zp_param_name

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int: ...

    @classmethod
    @abstractmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]: ...

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None: ...

    @abstractmethod
    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor: ...


class PlatformEnum(enum.Enum):
    CUDA = enum.auto()
    CPU = enum.auto()


def vllm_modules() -> dict[str, dict[str, Any]]:
    """Return the names of each module, with empty registries."""
    layers, kernels = "vllm.model_executor.layers", "vllm.model_executor.kernels.linear"
    methods: list[str] = ["awq"]
    configs: dict[str, type] = {}

    def register_quantization_config(name: str) -> Callable[[type], type]:
        def register(config: type) -> type:
            assert name not in methods  # vLLM overwrites the earlier one
            methods.append(name)
            configs[name] = config
            return config

        return register

    return {
        "vllm.envs": {"VLLM_PLUGINS": None},
        "vllm.platforms": {
            "PlatformEnum": PlatformEnum,
            "current_platform": SimpleNamespace(get_device_capability=lambda: None),
        },
        "vllm.distributed.parallel_state": {"get_pp_group": lambda: SimpleNamespace(is_first_rank=True)},
        "vllm.model_executor.models.utils": {"WeightsMapper": WeightsMapper},
        kernels: {"_POSSIBLE_KERNELS": {PlatformEnum.CUDA: [object]}},
        f"{kernels}.mixed_precision.MPLinearKernel": {"MPLinearKernel": MPLinearKernel},
        f"{layers}.fused_moe": {"RoutedExperts": RoutedExperts},
        f"{layers}.fused_moe.fused_moe_method_base": {"FusedMoEMethodBase": FusedMoEMethodBase},
        f"{layers}.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": LinearMethodBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        f"{layers}.quantization": {
            "QUANTIZATION_METHODS": methods,
            "registered": configs,
            "register_quantization_config": register_quantization_config,
        },
        f"{layers}.quantization.base_config": {
            "QuantizationConfig": QuantizationConfig,
            "QuantizeMethodBase": QuantizeMethodBase,
        },
        f"{layers}.vocab_parallel_embedding": {
            "ParallelLMHead": ParallelLMHead,
            "UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod,
            "VocabParallelEmbedding": VocabParallelEmbedding,
        },
    }


@contextmanager
def installed() -> Iterator[SimpleNamespace]:
    """Put vLLM's modules into `sys.modules`; yield them, and the modules of the plug-in."""
    modules: dict[str, ModuleType] = {}
    for name, members in vllm_modules().items():
        segments = name.split(".")
        for at in range(1, len(segments) + 1):
            package = modules.setdefault(".".join(segments[:at]), ModuleType(".".join(segments[:at])))
            package.__path__ = []
        vars(modules[name]).update(members)
    imported = {name: f"qload.engines.vllm.{name}" for name in PLUGIN}
    sys.modules.update(modules)
    try:
        plugin = {name: importlib.import_module(module) for name, module in imported.items()}
        yield SimpleNamespace(**plugin, vllm=modules)
    finally:  # other modules that were imported meanwhile stay
        for module in (*modules, *imported.values()):
            sys.modules.pop(module, None)
