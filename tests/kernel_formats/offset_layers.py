"""Random layers of integers that only qload's own orders represent: with offsets, or with 5 or 6 bits."""

from dataclasses import replace
from typing import Any

import torch

from qload.formats import (
    CTPackConfig,
    CTPackWeight,
    GGUFConfig,
    GGUFWeight,
    HQQConfig,
    HQQWeight,
    MLXConfig,
    MLXWeight,
    QuantoConfig,
    QuantoWeight,
    TorchAOInt4Config,
    TorchAOInt4Weight,
    TorchAOIntxConfig,
    TorchAOIntxWeight,
)
from qload.spec import Config, Weight
from qload.testing.random_layer import complete_sizes, fill_layer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Case = tuple[type[Weight], Config, torch.dtype]
CASES: dict[str, Case] = {
    **{f"mlx {bits} bits": (MLXWeight, MLXConfig(bits, 32), BF16) for bits in (2, 3, 4, 5, 6, 8)},
    "mlx float16": (MLXWeight, MLXConfig(4, 64), FP16),
    "mlx float32": (MLXWeight, MLXConfig(4, 128), FP32),
    "torchao int4": (TorchAOInt4Weight, TorchAOInt4Config(32), FP16),
    "torchao int4, one group": (TorchAOInt4Weight, TorchAOInt4Config(-1), BF16),
    "quanto 2 bits": (QuantoWeight, QuantoConfig(2, 32), BF16),
    "quanto 4 bits": (QuantoWeight, QuantoConfig(4, 64), FP16),
    "quanto 4 bits, one group": (QuantoWeight, QuantoConfig(4), FP32),
    **{f"hqq {bits} bits": (HQQWeight, HQQConfig(bits, 32), FP16) for bits in (2, 4, 5, 6, 8)},
    "hqq 3 bits": (HQQWeight, HQQConfig(3, 32, stored=torch.int32), FP16),
    "hqq float32": (HQQWeight, HQQConfig(4, -1, compute_dtype=torch.float32), FP32),
}
INTEGERS: dict[str, Case] = {
    "ct_pack 5 bits": (CTPackWeight, CTPackConfig(5, 32, symmetric=True, dense=True), FP16),
    "ct_pack 6 bits": (CTPackWeight, CTPackConfig(6, 32, symmetric=True, dense=True), FP16),
    "torchao_intx 5 bits": (TorchAOIntxWeight, TorchAOIntxConfig(5, 32), FP16),
    **{
        name: (GGUFWeight, GGUFConfig(name), FP16)
        for name in ("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
    },
}
ALL = {**CASES, **INTEGERS}


def drawn(case: Case, N: int = 40, K: int = 256, filling: str = "noise", seed: int = 0) -> Any:
    """Return a random layer of a case, with scales and offsets in its dtype."""
    weight_type, config, dtype = case
    if isinstance(config, QuantoConfig):
        config = replace(config, N=N, K=K)
    sizes = complete_sizes(weight_type.tensors(config), {"N": N, "K": K})
    facts = weight_type.sample_facts(config, sizes)
    generator = torch.Generator().manual_seed(seed)
    layer = fill_layer(weight_type, config, sizes, facts, filling, False, generator)
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in layer.tensors.items()
    }
    if isinstance(config, HQQConfig):  # no bits that no code has
        codes = torch.randint(0, 2**config.bits, (N, sizes["K"]), generator=generator)
        tensors["weight"] = config.packing.pack(codes)
    return replace(layer, tensors=tensors).weight()
