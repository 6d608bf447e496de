"""Whole models in a few kilobytes, for tests that would otherwise download one.

`make_checkpoint` writes one of a dialect and a model type; `tiny_config` is the `config.json` of a type.
"""

import json
import os
from binascii import crc32
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from qload.architecture import architecture_of
from qload.dtypes import TORCH
from qload.errors import ArgumentError, ConfigError, checked
from qload.errors.exceptions import written_to
from qload.formats import (
    AWQConfig,
    AWQWeight,
    CTPackConfig,
    CTPackWeight,
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    UnquantizedConfig,
    UnquantizedWeight,
)
from qload.layouts import STORED_MINUS_ONE, Stored
from qload.loader import ConfiguredFormat
from qload.models.config import LATENT_TYPES, text_config
from qload.spec import Role, TensorSpec, named

TINY_SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4}
YARN: Mapping[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LATENT: Mapping[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    **EXPERTS,
}
TYPE_ENTRIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "rope_parameters": YARN,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "intermediate_size_mlp": 56,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 5,
        "no_rope_layers": [1, 0],
        "floor_scale": 4,
    },
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    "deepseek_v3": {**LATENT, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
    "deepseek_v32": {
        **LATENT,
        "n_shared_experts": 1,
        "index_n_heads": 16,
        "index_head_dim": 8,
        "index_topk": 4,
    },
    "glm4_moe": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe_lite": {**LATENT, "n_shared_experts": 1, "routed_scaling_factor": 1.8},
}


def tiny_config(kind: str, **entries: Any) -> dict[str, Any]:
    """Return a tiny `config.json` of the model type `kind`, one that qload runs, with other `entries`.

    ArgumentError for another type.
    """
    if kind not in TYPE_ENTRIES:
        raise ArgumentError("model", f"one of {', '.join(TYPE_ENTRIES)}", repr(kind[:80]))
    config = {"model_type": kind, **TINY_SIZES, **TYPE_ENTRIES[kind], **entries}
    return {key: value for key, value in config.items() if kind not in LATENT_TYPES or key != "head_dim"}


# Inputs of a group. In act order, random codes of 64 inputs nearly always reach an end of their range.
GROUP_SIZE, ACT_ORDER_GROUP_SIZE = 32, 64
UNQUANTIZED_LAYERS = ("lm_head", "gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class Dialect:
    """A dialect of a format.

    `quantization_config`: of `config.json`; None for none. `stored_zero`: the stored code of every zero
    point; None for any code, or no zero points. `act_order`: whether the rows of groups are shuffled.
    """

    format: ConfiguredFormat
    quantization_config: Mapping[str, Any] | None
    stored_zero: int | None = None
    act_order: bool = False


def _gptq(bits: int = 4, version: str = "gptq", act_order: bool = False) -> Dialect:
    zeros = Stored() if version == "gptq_v2" else STORED_MINUS_ONE
    size = ACT_ORDER_GROUP_SIZE if act_order else GROUP_SIZE
    entries = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "desc_act": act_order,
        "sym": True,
        "checkpoint_format": version,
        "lm_head": False,
    }
    stored_zero = 2 ** (bits - 1) - (version == "gptq")
    config = GPTQConfig(bits, size, zeros, positional=True)
    return Dialect(ConfiguredFormat(GPTQWeight, config), entries, stored_zero, act_order)


def _awq() -> Dialect:
    entries = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP_SIZE,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": list(UNQUANTIZED_LAYERS[1:]),
    }
    return Dialect(ConfiguredFormat(AWQWeight, AWQConfig(GROUP_SIZE, 4)), entries)


def _packed(bits: int) -> Dialect:
    arguments = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP_SIZE,
    }
    entries = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
        "ignore": ["lm_head", *(f"re:.*\\.{name}$" for name in UNQUANTIZED_LAYERS[1:])],
    }
    return Dialect(ConfiguredFormat(CTPackWeight, CTPackConfig(bits, GROUP_SIZE)), entries)


def _fp8() -> Dialect:
    block = (128, 128)
    entries = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": list(block),
        "activation_scheme": "dynamic",
        "modules_to_not_convert": list(UNQUANTIZED_LAYERS),
    }
    return Dialect(ConfiguredFormat(Fp8Weight, Fp8Config("block", block)), entries)


DIALECTS: Mapping[str, Dialect] = {
    "plain": Dialect(ConfiguredFormat(UnquantizedWeight, UnquantizedConfig()), None),
    "gptq": _gptq(),
    "gptq-v2": _gptq(version="gptq_v2"),
    "gptq-act-order": _gptq(act_order=True),
    "gptq-8bit": _gptq(bits=8),
    "awq": _awq(),
    "compressed-tensors": _packed(4),
    "compressed-tensors-8bit": _packed(8),
    "fp8-block": _fp8(),
}


# Numbers of 32 bits; an odd factor makes the words of a tensor distinct.
WORD_COUNT, MULTIPLIER, SIGN_BIT = 1 << 32, 2654435761, 1 << 31
CHECKPOINT_SIZES: Mapping[str, int] = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "intermediate_size_mlp": 256,
    "moe_intermediate_size": 128,
    "vocab_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "index_head_dim": 64,
}


@checked
def make_checkpoint(
    format: str,
    folder: str | PathLike[str],
    *,
    model: str = "llama",
    config: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Write a tiny checkpoint of a `format` to a `folder`, and return its tensors by name.

    The words of a tensor are distinct numbers of their index, and floats are made of such numbers, so that a
    value read from a wrong index is wrong. Equal arguments write equal bytes. All matrices of decoder layers
    are quantized except routers; the weights are not trained.

    Parameters
    ----------
    format
        A dialect, one of `qload.testing.tiny_checkpoint.DIALECTS`.
    folder
        The folder to make; ArgumentError unless it is missing or empty.
    model
        A `model_type` of `load_model`; types with experts have four.
    config
        Other entries of `config.json`.

    Raises
    ------
    ArgumentError
        For an unknown format or type, for entries that the type cannot have, and for sizes that the format
        cannot store.
    """
    if format not in DIALECTS:
        raise ArgumentError("format", f"one of {', '.join(DIALECTS)}", repr(format[:80]))
    dialect, path, entries = DIALECTS[format], Path(folder), _config(model, config or {})
    _check_config(entries)
    if dialect.quantization_config is not None:
        entries["quantization_config"] = dict(dialect.quantization_config)
    tensors = _tensors(dialect, entries)
    path.mkdir(parents=True, exist_ok=True)
    if os.listdir(path):
        raise ArgumentError("folder", "an empty or a missing folder", str(path))
    text = json.dumps(entries, indent=2) + "\n"
    files = {"model.safetensors": save(tensors, {"format": "pt"}), "config.json": text.encode()}
    for name, content in files.items():
        with written_to(path / name):
            (path / name).write_bytes(content)
    return tensors


def _config(model: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The config with sizes of whole groups and blocks, which every format can store."""
    config = tiny_config(model)
    sizes = {key: size for key, size in CHECKPOINT_SIZES.items() if key in config}
    return {**config, **sizes, "dtype": "bfloat16", **entries}


def _check_config(config: Mapping[str, Any]) -> None:
    """Raise ArgumentError for entries that are invalid for the type."""
    try:
        text_config(config)
    except ConfigError as error:
        raise ArgumentError(f"config: {error.key}", error.expected, error.got) from error


def _tensors(dialect: Dialect, config: Mapping[str, Any]) -> dict[str, Tensor]:
    known = architecture_of(config)
    assert known is not None  # every type of a tiny config has a table
    tensors: dict[str, Tensor] = {}
    for name in known.required():
        expected, shape = known.expected(name), known.shape(name)
        if shape is not None:
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            tensors[name] = (mean + _uniform(name, shape) / 8).bfloat16()
        elif expected is not None:
            unquantized = ".layers." not in name or name.rpartition(".")[2] in UNQUANTIZED_LAYERS
            plain = {f"{name}.weight": (_uniform(name, expected) * expected[1] ** -0.5).bfloat16()}
            sibling = min(known.siblings(name), default=name)
            tensors |= plain if unquantized else _layer(dialect, name, sibling, *expected)
    return tensors


def _layer(dialect: Dialect, prefix: str, sibling: str, N: int, K: int) -> dict[str, Tensor]:
    """The tensors of the format's declaration, of sizes that follow from N and K.

    `sibling`: the first of the layers with the same inputs, which share their act order.
    """
    sizes = {"N": N, "K": K}
    specs = [spec for spec in dialect.format.specs if not spec.optional]
    for axis in (axis for spec in specs for axis in spec.axes if axis.free):
        sizes[axis.free or ""] = axis.size(sizes[axis.dim]) or 0
    return {
        named(prefix, spec.suffix): _tensor(
            dialect, f"{sibling if spec.index_of else prefix}.{spec.name}", spec, sizes
        )
        for spec in specs
    }


def _tensor(dialect: Dialect, name: str, spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    shape, dtype = _shape(name, spec, sizes), TORCH[spec.dtypes[0]]
    if spec.name == "weight_shape":
        return torch.tensor([sizes["N"], sizes["K"]])
    if spec.index_of:
        rows = torch.arange(sizes["K"]) // (sizes["K"] // sizes[spec.index_of])
        return (rows[_order(name, sizes["K"])] if dialect.act_order else rows).to(dtype)
    if spec.role is Role.SCALE:
        return (0.01 + 0.005 * _uniform(name, shape)).to(dtype)
    if dtype.is_floating_point:
        plain = spec.role is Role.FLOAT
        return (_uniform(name, shape) * (sizes["K"] ** -0.5 if plain else 256.0)).to(
            torch.bfloat16 if plain else dtype
        )
    if "zeros" in spec.name and dialect.stored_zero is not None:
        bits = getattr(dialect.format.config, "bits", 4)
        word = sum(dialect.stored_zero << at for at in range(0, 32, bits))
        return torch.full(shape, word - (WORD_COUNT if word >= SIGN_BIT else 0), dtype=dtype)
    words = _distinct_words(name, shape)
    return torch.where(words >= SIGN_BIT, words - WORD_COUNT, words).to(dtype)


def _shape(name: str, spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    extents = [sizes[axis.free] if axis.free else axis.size(axis.logical(sizes) or 0) for axis in spec.axes]
    if None in extents:
        raise ArgumentError(
            "config", "sizes that the format can store", f"{name}: {spec.text} of {dict(sizes)}"
        )
    return tuple(extent for extent in extents if extent is not None)


def _distinct_words(name: str, shape: tuple[int, ...]) -> Tensor:
    """A distinct number below 2**32 for each index of a tensor; int64."""
    count = torch.Size(shape).numel()
    words = (torch.arange(count) * MULTIPLIER + crc32(name.encode())) % WORD_COUNT
    # The low bits of a product repeat after a few indices, the high ones do not.
    return (words ^ words >> 16).reshape(shape)


def _uniform(name: str, shape: tuple[int, ...]) -> Tensor:
    """A number of [-1, 1) for each index, float64."""
    return _distinct_words(name, shape).double() / SIGN_BIT - 1


def _order(name: str, K: int) -> Tensor:
    """A pseudo-random order of rows, fixed by the name."""
    return torch.argsort(_distinct_words(name, (K,)))
