"""Small mixtures, each expert stored by itself and all of them in stacks, as their owners lay them out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E, HIDDEN, INNER = 3, 64, 96
LAYER = "model.layers.0"
FP8 = torch.float8_e4m3fn
BLOCK = 32


@dataclass(frozen=True)
class Kind:
    """A type of model: where its experts are, and how a stack of them lies. Source: transformers 5.23.0."""

    lead: str
    inputs_first: bool = False
    interleaved: bool = False
    inner: str = "moe_intermediate_size"
    count: str = "num_experts"


KINDS = {
    "gpt_oss": Kind("mlp.experts", True, True, "intermediate_size", "num_local_experts"),
    "llama4_text": Kind("feed_forward.experts", True, False, "intermediate_size", "num_local_experts"),
    "mixtral": Kind("block_sparse_moe.experts", False, False, "intermediate_size", "num_local_experts"),
    "qwen3_moe": Kind("mlp.experts"),
    "deepseek_v3": Kind("mlp.experts", count="n_routed_experts"),
}
PARTS = ("gate_proj", "up_proj", "down_proj")


def config(kind: str, **more: Any) -> dict[str, Any]:
    """The sizes that say how large a stack is."""
    sizes = {"hidden_size": HIDDEN, KINDS[kind].inner: INNER, KINDS[kind].count: E}
    return {"model_type": kind, "first_k_dense_replace": 0, **sizes, **more}


def lead(kind: str) -> str:
    """The module that holds the experts."""
    return f"{LAYER}.{KINDS[kind].lead}"


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Bytes of no order, none of which is a NaN."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.uint8:
        return torch.randint(0, 255, shape, generator=generator, dtype=torch.uint8)
    return torch.randn(shape, generator=generator).to(dtype)


def outputs(part: str) -> tuple[int, int]:
    """(N, K) of a part."""
    return (HIDDEN, INNER) if part == "down_proj" else (INNER, HIDDEN)


def fused(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """(E, N, ...) of both in one tensor of 2 N outputs."""
    return torch.stack([gate, up], 2).flatten(1, 2) if KINDS[kind].interleaved else torch.cat([gate, up], 1)


def laid(kind: str, stack: Tensor) -> Tensor:
    """(E, N, K), or (E, K, N) where inputs come first."""
    return stack.transpose(1, 2).contiguous() if KINDS[kind].inputs_first else stack


@dataclass(frozen=True)
class Mixture:
    """The same tensors twice: `each` expert's by itself, and `stacks` of them."""

    each: dict[str, Tensor]
    stacks: dict[str, Tensor]


def mixture(kind: str, form: str) -> Mixture:
    """One of FORMS, for a type of model."""
    fields = FORMS[form]
    by_part = {part: {suffix: make(part) for suffix, make in fields.items()} for part in PARTS}
    each: dict[str, Tensor] = {}
    stacks: dict[str, Tensor] = {}
    for suffix in fields:
        gate, up, down = (by_part[part][suffix] for part in PARTS)
        for name, tensor in (("gate_up_proj", _join(kind, suffix, gate, up)), ("down_proj", down)):
            stacks[f"{lead(kind)}.{name}{suffix}"] = _lie(kind, suffix, tensor)
        for part, tensor in zip(PARTS, (gate, gate if gate.ndim < 2 else up, down), strict=True):
            for expert in range(E):
                one = tensor if tensor.ndim == 0 else tensor[expert]
                name = f"{lead(kind)}.{expert}.{part}.{OWN[suffix]}"
                each[name] = one.flatten(1).clone() if suffix == "_blocks" else one.clone()
    return Mixture(each, stacks)


def _join(kind: str, suffix: str, gate: Tensor, up: Tensor) -> Tensor:
    return gate if gate.ndim < 2 else fused(kind, gate, up)


def _lie(kind: str, suffix: str, tensor: Tensor) -> Tensor:
    """Biases have no inputs, and MXFP4's are the same in every type of model."""
    return tensor if tensor.ndim != 3 or suffix in ("_blocks", "_scales") else laid(kind, tensor)


OWN = {
    "": "weight",
    "_bias": "bias",
    "_weight_scale": "weight_scale",
    "_weight_scale_2": "weight_scale_2",
    "_input_scale": "input_scale",
    "_scale_inv": "weight_scale_inv",
    "_blocks": "weight_packed",
    "_scales": "weight_scale",
}


def _weight(dtype: torch.dtype, packed: int = 1) -> Any:
    def make(part: str) -> Tensor:
        N, K = outputs(part)
        return drawn((E, N, K // packed), dtype, PARTS.index(part))

    return make


def _grid(n: int, k: int, dtype: torch.dtype = torch.float32) -> Any:
    """A scale for n outputs and k inputs; 0: for all of them."""

    def make(part: str) -> Tensor:
        N, K = outputs(part)
        return drawn((E, N // n if n else 1, K // k if k else 1), dtype, 10 + PARTS.index(part)).abs()

    return make


def _outputs(dtype: torch.dtype) -> Any:
    return lambda part: drawn((E, outputs(part)[0]), dtype, 20 + PARTS.index(part)).abs()


def _one(part: str) -> Tensor:
    return torch.tensor(0.5)


def _each(part: str) -> Tensor:
    return torch.arange(1.0, E + 1)


def _blocks(part: str) -> Tensor:
    N, K = outputs(part)
    return drawn((E, N, K // 32, 16), torch.uint8, PARTS.index(part))


FORMS: dict[str, dict[str, Any]] = {
    "plain": {"": _weight(torch.bfloat16), "_bias": _outputs(torch.bfloat16)},
    "fp8_scalar": {"": _weight(FP8), "_weight_scale": _one, "_input_scale": _one},
    "fp8_scalar_each": {"": _weight(FP8), "_weight_scale": _each},
    "fp8_channel": {"": _weight(FP8), "_weight_scale": _outputs(torch.float32)},
    "fp8_channel_matrix": {"": _weight(FP8), "_weight_scale": _grid(1, 0)},
    "fp8_block": {"": _weight(FP8), "_scale_inv": _grid(BLOCK, BLOCK)},
    "nvfp4": {
        "": _weight(torch.uint8, 2),
        "_weight_scale": _grid(1, 16, FP8),
        "_weight_scale_2": _one,
        "_input_scale": _one,
        "_bias": _outputs(torch.bfloat16),
    },
    "mxfp4": {"_blocks": _blocks, "_scales": lambda part: _weight(torch.uint8, 32)(part) // 2},
}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "fp8_scalar": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "fp8_scalar_each": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "fp8_channel": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "fp8_channel_matrix": {"quant_method": "fp8"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "mxfp4"},
}
# Blocks of outputs that gate and up share in turns have no scale of an expert's own.
CASES = [
    (kind, form) for kind in KINDS for form in FORMS if not (KINDS[kind].interleaved and form == "fp8_block")
]
