"""Layers with given traits: their configs, and the facts left open by declarations of formats."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.formats import (
    FORMATS,
    AWQConfig,
    BNB4Config,
    BNBConfig,
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTIntConfig,
    CTPackConfig,
    CTPackTensorConfig,
    CTPackTensorWeight,
    CTPackWeight,
    Exl2Config,
    Exl2Weight,
    Fp8Config,
    GPTQConfig,
    Marlin24Config,
    MarlinConfig,
    ModelOptAWQConfig,
    ModelOptAWQWeight,
)
from qload.formats.bnb import TABLES, dynamic_map
from qload.layouts import STORED_MINUS_ONE, Stored, gptq
from qload.layouts.exl2 import RUN_CODES
from qload.spec import Config, Weight
from qload.testing.random_layer import DrawnLayer, complete_sizes, fill_layer
from qload.testing.traits import Traits, contract

FP8_BLOCK = (128, 128)  # outputs, inputs

_CONFIGS: dict[str, Callable[[Traits], Config]] = {
    "gptq": lambda t: GPTQConfig(
        t.bits,
        t.group_size,
        Stored() if t.zeros == "v2" else STORED_MINUS_ONE,
        positional=t.group_size != -1,
    ),
    "awq": lambda t: AWQConfig(t.group_size, t.bits, zero_point=not t.symmetric),
    "marlin": lambda t: MarlinConfig(t.group_size, t.bits),
    "marlin_24": lambda t: Marlin24Config(t.group_size, t.bits),
    "fp8": lambda t: Fp8Config(
        "block" if t.variant == "block" else "channel" if t.variant == "channel" else "tensor",
        FP8_BLOCK if t.variant == "block" else None,
    ),
    "bnb_nf4": lambda t: BNB4Config("nf4", t.group_size, _dtype(t), double_quant=t.variant == "double"),
    "bnb_fp4": lambda t: BNB4Config("fp4", t.group_size, _dtype(t), double_quant=t.variant == "double"),
    "ct_pack": lambda t: CTPackConfig(
        t.bits,
        t.group_size,
        t.symmetric,
        t.act_order,
        groups_lie="in order" if not t.act_order else "anywhere" if t.group_size == -1 else "positional",
    ),
    "ct_pack_tensor": lambda t: CTPackTensorConfig(t.bits, t.symmetric),
    "ct_int": lambda t: CTIntConfig(
        {"channel": (1, -1), "group": (1, 32)}.get(t.variant), t.bits, t.symmetric, static=False
    ),
    "modelopt_awq": lambda t: ModelOptAWQConfig(t.group_size, scaled_inputs=False),
}


def _sample_bnb(config: BNB4Config, sizes: dict[str, int]) -> dict[str, Tensor]:
    """A quantization state, a table of 16 values, and quantized scales if the config has them; all exact."""
    N, K, run = sizes["N"], sizes["K"], 256
    state: dict[str, Any] = {"quant_type": config.quant_type, "blocksize": config.blocksize}
    state |= {"dtype": str(config.dtype).removeprefix("torch."), "shape": [N, K]}
    facts = {"quant_map": torch.arange(16) / 8 - 1}
    if config.double_quant:
        blocks = -(-N * K // config.blocksize)
        sizes["M"] = -(-blocks // run)
        state |= {"nested_blocksize": run, "nested_dtype": "float32", "nested_offset": 0.25}
        facts["absmax"] = (torch.arange(blocks) % 256).to(torch.uint8)
        facts["nested_absmax"] = torch.arange(sizes["M"]) + 1.0
        facts["nested_quant_map"] = torch.arange(256) / 256
    return facts | {"quant_state": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


def _sample_bnb_int8(config: BNBConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Scales of 127 times a power of two, so that sums are exact."""
    return {"SCB": 127 * 2.0 ** (torch.arange(sizes["N"]) % 4 - 2)}


def _sample_exl2(config: Exl2Config, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Groups of 64 rows, the last of 32 or 64, with widths that fall from 8 bits; equal for equal K."""
    sizes["K"] *= 1 if sizes["K"] % 32 == 0 else 32
    K, G = sizes["K"], -(-sizes["K"] // 64)
    bits = torch.tensor(list(RUN_CODES))[torch.arange(G) * len(RUN_CODES) // G]
    ends = (bits * torch.tensor([64] * (G - 1) + [K - 64 * (G - 1)]) // 32).cumsum(0)
    sizes["G"], sizes["R"] = G, int(ends[-1])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
    return {
        "q_groups": torch.stack([bits, starts], dim=1).flatten().to(torch.int16),
        "q_scale_max": (2.0 ** (torch.arange(G) % 4 - 10)).half(),  # below 2**-6 is subnormal once divided
        "q_invperm": torch.randperm(K, generator=torch.Generator().manual_seed(K)).to(torch.int32),
    }


def _sample_ct_pack(config: CTPackConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
    """The shape, with N and K raised to several words and groups."""
    for dim, unit in (("N", 16), ("K", 48)):
        sizes[dim] *= 1 if sizes[dim] >= unit else unit
    for letter in sizes.keys() & {"G"}:  # of groups with an index
        sizes[letter] = config.groups(sizes["K"])
    return {"weight_shape": torch.tensor([sizes["N"], sizes["K"]])}


def _sample_ct_pack_tensor(config: CTPackTensorConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
    """The shape, with K raised to several words."""
    sizes["K"] *= 1 if sizes["K"] >= 48 else 48
    return {"weight_shape": torch.tensor([sizes["N"], sizes["K"]])}


def _sample_modelopt_awq(config: ModelOptAWQConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Input factors, powers of two, if the config has them."""
    factors = 2.0 ** (torch.arange(sizes["K"]) % 3 - 1)
    return {"pre_quant_scale": factors} if config.scaled_inputs else {}


# Functions of a config and the sizes by letter that return facts by field. They may set the sizes of free
# axes, and raise N and K.
FACT_SAMPLERS: dict[type[Weight], Callable[[Any, dict[str, int]], dict[str, Tensor]]] = {
    BNBNF4Weight: _sample_bnb,
    BNBFP4Weight: _sample_bnb,
    BNBWeight: _sample_bnb_int8,
    CTPackTensorWeight: _sample_ct_pack_tensor,
    CTPackWeight: _sample_ct_pack,
    Exl2Weight: _sample_exl2,
    ModelOptAWQWeight: _sample_modelopt_awq,
}


def weight_type_of(format: str) -> type[Weight]:
    """Return the type of the typed weights of a `format`, by its name; ArgumentError for an unknown one."""
    known = {weight_type.format: weight_type for weight_type in FORMATS}
    if format not in known:
        raise ArgumentError("format", f"one of {', '.join(known)}", repr(format))
    return known[format]


def sample_facts(weight_type: type[Weight], config: Config, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Return the facts of a layer by field that its declaration leaves open; may change `sizes` by letter.

    `weight_type`, `config`: the format of the layer.
    """
    sampler = FACT_SAMPLERS.get(weight_type)
    return {} if sampler is None else sampler(config, sizes)


def layer_of(traits: Traits, N: int, K: int, *, filling: str = "coded", seed: int = 0) -> DrawnLayer:
    """Return a layer with these `traits`, `N` outputs and `K` inputs; equal arguments give equal layers.

    `filling`: "coded", with powers of two for scales, or "noise"; `seed`: of its random numbers.
    ArgumentError for traits that exclude each other.
    """
    contract(traits.format)
    if traits.zeros == "wrapping" and traits.symmetric:
        raise ArgumentError("symmetric", "False for zero points that wrap", "True")
    weight_type = weight_type_of(traits.format)
    config = _CONFIGS[traits.format](traits) if traits.format in _CONFIGS else weight_type.example
    generator = torch.Generator().manual_seed(seed)
    sizes = complete_sizes(weight_type.tensors(config), {"N": N, "K": K})
    facts = sample_facts(weight_type, config, sizes)
    if isinstance(config, BNB4Config):
        facts |= _bnb_tables(config, facts)
    layer = fill_layer(weight_type, config, sizes, facts, filling, traits.act_order, generator)
    tensors = {name: _in_dtype(layer, name, tensor, traits) for name, tensor in layer.tensors.items()}
    if isinstance(config, GPTQConfig):
        tensors["qzeros"] = _fill_zero_points(config, traits, tensors["scales"].shape, generator)
    return DrawnLayer(weight_type, config, tensors, layer.sizes, f"{traits.words()}, seed {seed}")


def _dtype(traits: Traits) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, traits.dtype)
    return dtype


def _bnb_tables(config: BNB4Config, facts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tables of bitsandbytes, which are constants in its kernels."""
    tables = {"quant_map": torch.tensor(TABLES[config.quant_type])}
    if "nested_quant_map" in facts:
        tables["nested_quant_map"] = torch.tensor(dynamic_map())
    return tables


def _in_dtype(layer: DrawnLayer, name: str, tensor: Tensor, traits: Traits) -> Tensor:
    """A float16 tensor in the dtype of activations, if the declaration allows it; any other unchanged."""
    spec = next(each for each in layer.weight_type.tensors(layer.config) if each.name == name)
    dtype = _dtype(traits)
    return tensor.to(dtype) if tensor.dtype == torch.float16 and dtype in spec.dtypes else tensor


def _fill_zero_points(
    config: GPTQConfig, traits: Traits, shape: torch.Size, generator: torch.Generator
) -> Tensor:
    """Packed zero points: all in the middle, any values without a wrap, or some of 0."""
    top = 2**config.bits
    if traits.symmetric:
        zeros = torch.full(shape, top // 2, dtype=torch.int32)
    else:
        least = 0 if traits.zeros in ("v2", "wrapping") else 1
        zeros = torch.randint(least, top, shape, generator=generator).to(torch.int32)
        if traits.zeros == "wrapping":
            zeros.view(-1)[:: max(1, zeros.numel() // 3)] = 0
    return config.zeros.write(zeros, gptq.columns(config.bits))
