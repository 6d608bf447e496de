"""Layers with given traits: their configs, and the facts left open by declarations of formats."""

from collections.abc import Callable

import torch
from torch import Tensor

from qload.dtypes import STORED
from qload.errors import ArgumentError
from qload.formats import (
    FORMATS,
    AWQConfig,
    BNB4Config,
    CTIntConfig,
    CTPackConfig,
    CTPackTensorConfig,
    Fp8Config,
    GGUFConfig,
    GPTQConfig,
    HQQConfig,
    Marlin24Config,
    MarlinConfig,
    MLXConfig,
    MLXFloatConfig,
    ModelOptAWQConfig,
)
from qload.layouts import STORED_MINUS_ONE, Stored, gptq
from qload.layouts.bnb import TABLES, dynamic_map
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
    "gguf": lambda t: GGUFConfig(t.variant),
    "mlx": lambda t: MLXConfig(t.bits, t.group_size),
    "mlx_float": lambda t: MLXFloatConfig("nvfp4" if t.variant == "nvfp4" else "mxfp4"),
    "hqq": lambda t: HQQConfig(t.bits, t.group_size, compute_dtype=_dtype(t)),
}


def weight_type_of(format: str) -> type[Weight]:
    """Return the type of the typed weights of a `format`, by its name; ArgumentError for an unknown one."""
    known = {weight_type.format: weight_type for weight_type in FORMATS}
    if format not in known:
        raise ArgumentError("format", f"one of {', '.join(known)}", repr(format))
    return known[format]


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
    facts = weight_type.sample_facts(config, sizes)
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
    return tensor.to(dtype) if tensor.dtype == torch.float16 and STORED[dtype] in spec.dtypes else tensor


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
