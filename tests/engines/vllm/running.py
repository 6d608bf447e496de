"""A model in vLLM's own classes on a CPU: real config, real loader, real layers; attention by torch.

Import this before anything else of vLLM.
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_MLA_DISABLE", "1")  # latent attention needs kernels of a GPU
os.environ.setdefault("VLLM_PLUGINS", "")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import tests.engines.vllm.stubs  # noqa: F401, I001
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

with warnings.catch_warnings():  # which are no marks' to ignore: they come while tests are collected
    warnings.simplefilter("ignore")  # vLLM imports torch's compiler, which warns of torch
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # which it cannot tell without its own native modules
    torch.accelerator.empty_cache = lambda: None

    from vllm.config import (
        CompilationConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import parallel_state
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.models import registry

    from qload.engines.vllm import register


def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Causal attention of one sequence that has no past."""
    q, k, v = (
        each.view(-1, heads, size).transpose(0, 1)[None]
        for each, heads, size in (
            (query, self.num_heads, self.head_size),
            (key, self.num_kv_heads, self.head_size),
            (value, self.num_kv_heads, self.head_size_v),
        )
    )
    seen = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    if self.sliding_window is not None:
        seen = seen.triu(1 - self.sliding_window)
    y = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.impl.scale, enable_gqa=True)
    return y[0].transpose(0, 1).reshape(query.shape[0], -1)


OWN_FORWARD = Attention.forward
Attention.forward = attend
registry._run_in_subprocess = lambda look: look()  # at a class of models, which takes a minute elsewhere


def saved(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    architectures = {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
    }
    said = {"architectures": [architectures[config["model_type"]]], **config, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(said))
    held = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


def config_of(folder: Path, ranks: int = 1, quantization: str | None = "qload", **said: Any) -> VllmConfig:
    """vLLM's config of a checkpoint; `said`: what `--hf-overrides` adds to the quantization's section."""
    section = json.loads((folder / "config.json").read_text()).get("quantization_config")
    overrides = {"quantization_config": {**section, "qload": said}} if said and section else {}
    parallel = {"enable_expert_parallel": bool(said.pop("expert_parallel", False))} if said else {}
    model = ModelConfig(
        model=str(folder),
        dtype="float32",
        quantization=quantization,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        hf_overrides=overrides,
    )
    return VllmConfig(
        model_config=model,
        load_config=LoadConfig(),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(tensor_parallel_size=ranks, **parallel),
        compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
    )


def loaded(config: VllmConfig) -> torch.nn.Module:
    """The model, after vLLM's own loader, of this process's rank; `join` first."""
    with set_current_vllm_config(config):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(config.parallel_config.tensor_parallel_size)
        return get_model(vllm_config=config)


def join(rank: int = 0, ranks: int = 1, port: int = 0) -> None:
    """Tell vLLM which rank this process is."""
    method = f"tcp://127.0.0.1:{port}"
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(ranks, rank, method, rank, backend="gloo")


def logits(model: Any, config: VllmConfig, ids: Tensor) -> Tensor:
    """(sequences, tokens, vocabulary), in float32."""
    found = []
    for sequence in ids:
        context = set_forward_context(None, config, num_tokens=len(sequence))
        positions = torch.arange(len(sequence))
        with torch.no_grad(), set_current_vllm_config(config), context:
            hidden = model(sequence, positions, None)
            found.append(model.compute_logits(hidden))
    return torch.stack(found).float()


register()
