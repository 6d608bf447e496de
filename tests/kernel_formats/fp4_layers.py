"""Layers of four-bit floats with given codes and scales, and their repack to Marlin's orders."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.formats import CTMXFP4Weight, CTNVFP4Weight, ModelOptNVFP4Weight, MXFP4Config, NVFP4Config
from qload.kernel_formats import Fp4MarlinVllm033Weight, Fp4MarlinWeight, repack
from qload.layouts import fp4
from qload.spec import Weight
from qload.testing import emulators

HALF, BRAIN = torch.float16, torch.bfloat16
KINDS: dict[Any, tuple[str, str]] = {
    CTNVFP4Weight: ("weight_packed", "weight_global_scale"),
    ModelOptNVFP4Weight: ("weight", "weight_scale_2"),
}
GENERATIONS = ("marlin_vllm_0_11", "marlin_vllm_0_33")
NVFP4 = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.format)


def codes_of(N: int, K: int) -> Tensor:
    """Return counting codes (N, K), different in every row."""
    return (torch.arange(K) + torch.arange(N)[:, None] * 5 + torch.arange(K) // 16) % 16


def nvfp4(
    scales: Tensor,
    codes: Tensor | None = None,
    second: Any = 0.5,
    kind: Any = ModelOptNVFP4Weight,
    **more: Any,
) -> Any:
    """Build a layer with `scales` (N, K / 16), and one second scale, or one per part."""
    packed, name = KINDS[kind]
    N, K = scales.shape[0], 16 * scales.shape[1]
    tensors = {
        packed: fp4.pack(codes_of(N, K) if codes is None else codes),
        "weight_scale": scales.to(torch.float8_e4m3fn),
        name: torch.tensor(second).reshape(-1),
    }
    return kind(config=NVFP4Config(), **tensors, **more)


def mxfp4(exponents: Tensor, codes: Tensor | None = None, **more: Any) -> CTMXFP4Weight:
    """Build a layer with `exponents` (N, K / 32)."""
    N, K = exponents.shape[0], 32 * exponents.shape[1]
    packed = fp4.pack(codes_of(N, K) if codes is None else codes)
    exponents = exponents.to(torch.uint8)
    return CTMXFP4Weight(config=MXFP4Config(), weight_packed=packed, weight_scale=exponents, **more)


def pack(weight: Weight, dtype: torch.dtype = BRAIN, layout: str = "marlin") -> Fp4MarlinWeight:
    packed = repack(weight, layout, dtype=dtype)
    assert isinstance(packed, Fp4MarlinWeight)
    return packed


def lanes_read(packed: Fp4MarlinWeight) -> Tensor:
    """Emulate the kernel of the weight's generation: padded weight (K, N)."""
    tensors = packed.qweight, packed.scales, packed.global_scale
    if isinstance(packed, Fp4MarlinVllm033Weight):
        return emulators.fp4_marlin_vllm_0_33_weight(*tensors, dtype=packed.config.dtype)
    return emulators.fp4_marlin_weight(*tensors)
