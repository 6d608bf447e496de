"""A layer with given traits: which config it has, and what its tensors hold besides codes and scales."""

from collections.abc import Callable

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.formats import (
    FORMATS,
    AWQConfig,
    BNB4Config,
    CTIntConfig,
    CTPackConfig,
    CTPackTensorConfig,
    Fp8Config,
    GPTQConfig,
    Marlin24Config,
    MarlinConfig,
    ModelOptAWQConfig,
)
from qload.formats.bnb import TABLES, dynamic_map
from qload.layouts import STORED_MINUS_ONE, Stored, gptq
from qload.spec import Config, Weight
from qload.testing.drawn import DrawnLayer, complete, filled
from qload.testing.samples import FACTS
from qload.testing.traits import Traits, contract

BLOCK = (128, 128)  # of FP8: (outputs, inputs)

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
        BLOCK if t.variant == "block" else None,
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


def weight_type_of(format: str) -> type[Weight]:
    """The type of the typed weights of a `format`, by its name; ArgumentError for none."""
    found = {weight_type.format: weight_type for weight_type in FORMATS}
    if format not in found:
        raise ArgumentError("format", f"one of {', '.join(found)}", repr(format))
    return found[format]


def layer_of(traits: Traits, N: int, K: int, *, filling: str = "coded", seed: int = 0) -> DrawnLayer:
    """A layer with these `traits`, of `N` outputs and `K` inputs: the same one for the same arguments.

    `filling`: "coded", whose scales are powers of two, or "noise"; `seed`: of its random numbers.
    ArgumentError for traits that no layer has together.
    """
    contract(traits.format)
    if traits.zeros == "wrapping" and traits.symmetric:
        raise ArgumentError("symmetric", "False where zero points wrap: they are not all the middle", "True")
    weight_type = weight_type_of(traits.format)
    config = _CONFIGS[traits.format](traits) if traits.format in _CONFIGS else weight_type.example
    generator = torch.Generator().manual_seed(seed)
    sizes = complete(weight_type.tensors(config), {"N": N, "K": K})
    facts = FACTS[weight_type](config, sizes) if weight_type in FACTS else {}
    if isinstance(config, BNB4Config):
        facts |= _owners_tables(config, facts)
    made = filled(weight_type, config, sizes, facts, filling, traits.act_order, generator)
    tensors = {name: _in_dtype(made, name, tensor, traits) for name, tensor in made.tensors.items()}
    if isinstance(config, GPTQConfig):
        tensors["qzeros"] = _zero_points(config, traits, tensors["scales"].shape, generator)
    return DrawnLayer(weight_type, config, tensors, made.sizes, f"{traits.words()}, seed {seed}")


def _dtype(traits: Traits) -> torch.dtype:
    found: torch.dtype = getattr(torch, traits.dtype)
    return found


def _owners_tables(config: BNB4Config, facts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tables that bitsandbytes has, which its kernels know by heart."""
    own = {"quant_map": torch.tensor(TABLES[config.quant_type])}
    if "nested_quant_map" in facts:
        own["nested_quant_map"] = torch.tensor(dynamic_map())
    return own


def _in_dtype(made: DrawnLayer, name: str, tensor: Tensor, traits: Traits) -> Tensor:
    """In the activations' dtype where it is a 16-bit float that may be stored so."""
    spec = next(each for each in made.weight_type.tensors(made.config) if each.name == name)
    own = _dtype(traits)
    return tensor.to(own) if tensor.dtype == torch.float16 and own in spec.dtypes else tensor


def _zero_points(config: GPTQConfig, traits: Traits, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Words of the middle, of all that both readings agree on, or with zeros among them that wrap."""
    top = 2**config.bits
    if traits.symmetric:
        zeros = torch.full(shape, top // 2, dtype=torch.int32)
    else:
        least = 0 if traits.zeros in ("v2", "wrapping") else 1
        zeros = torch.randint(least, top, shape, generator=generator).to(torch.int32)
        if traits.zeros == "wrapping":
            zeros.view(-1)[:: max(1, zeros.numel() // 3)] = 0
    return config.zeros.write(zeros, gptq.columns(config.bits))
