"""Drawn models of several architectures, in formats with a lossless type of ggml."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from qload.architecture import architecture_of
from qload.architecture.architecture import Architecture

RANDOM = np.random.default_rng(0)
SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rope_theta": 5e5},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": True},
}


def drawn(high: int, *shape: int, low: int = 0) -> NDArray[np.uint8]:
    return RANDOM.integers(low, high, shape).astype(np.uint8)


def integers(bits: int, N: int, K: int) -> dict[str, Tensor]:
    """Draw a layer of pack-quantized in groups of 32."""
    codes, scales = drawn(2**bits, N, K), RANDOM.standard_normal((N, K // 32)).astype(np.float16)
    words = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    return {
        "weight_packed": torch.from_numpy(words).view(torch.int32),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([N, K]),
    }


def mxfp4(N: int, K: int) -> dict[str, Tensor]:
    """Draw a layer of compressed-tensors without codes of -0."""
    codes = drawn(16, N, K)
    codes[codes == 8] = 0
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    return {"weight_packed": packed, "weight_scale": torch.from_numpy(drawn(250, N, K // 32))}


def nvfp4(N: int, K: int) -> dict[str, Tensor]:
    """Draw a layer of ModelOpt without codes of -0."""
    scales = torch.from_numpy(drawn(0x7F, N, K // 16)).view(torch.float8_e4m3fn)
    packed = mxfp4(N, K)["weight_packed"]
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor([0.25])}


def compressed_tensors(layout: str, **weights: object) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def of_integers(bits: int) -> dict[str, Any]:
    return compressed_tensors("pack-quantized", num_bits=bits, type="int", strategy="group", group_size=32)


FORMATS: Mapping[str, Any] = {  # type of ggml -> draw a layer, config, target of the way back
    "Q4_0": (lambda N, K: integers(4, N, K), of_integers(4), "compressed-tensors"),
    "Q8_0": (lambda N, K: integers(8, N, K), of_integers(8), "compressed-tensors"),
    "MXFP4": (
        mxfp4,
        compressed_tensors("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        "mxfp4",
    ),
    "NVFP4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "nvfp4_modelopt"),
}


def is_quantized(architecture: Architecture, name: str) -> bool:
    """Return whether a tensor is a matrix of a layer, except for routers."""
    shape = architecture.expected(name)
    return ".layers." in name and len(shape or ()) == 2 and not name.endswith(("mlp.gate", "moe.gate"))


def checkpoint(folder: Path, model: str, kind: str, **changes: object) -> Path:
    """Write a drawn model in the source format of `kind`, a type of ggml."""
    draw, section, _ = FORMATS[kind]
    config = {"model_type": model, **SIZES, **MODELS[model], **changes}
    architecture, tensors = architecture_of(config), {}
    assert architecture is not None
    for name in architecture.required():
        shape = architecture.shape(name) or architecture.expected(name)
        assert shape is not None
        if is_quantized(architecture, name):
            tensors |= {f"{name}.{field}": tensor for field, tensor in draw(*shape).items()}
        else:
            values = torch.from_numpy(RANDOM.standard_normal(shape).astype(np.float32)).bfloat16()
            tensors[name if name.endswith((".weight", ".bias")) else f"{name}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return folder
