"""Sample weights with random contents, one for each format of a kill matrix."""

from collections.abc import Callable

import torch
from torch import Tensor

from qload.formats import (
    AWQConfig,
    AWQWeight,
    CTPackConfig,
    CTPackWeight,
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    ModelOptNVFP4Weight,
    NVFP4Config,
)
from qload.spec import Weight

N, K, GROUP = 128, 256, 32  # the smallest sizes that most kernels take


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _words(seed: int, *shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=_random(seed), dtype=torch.int32)


def _scales(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (0.002 + 0.004 * torch.rand(shape, generator=_random(seed))).to(dtype)


def gptq(*, act_order: bool = False) -> GPTQWeight:
    """GPTQ with zero points of 2 to 8, of which none wraps at one more or less; `act_order`: shuffled."""
    index = torch.arange(K) // GROUP
    if act_order:
        index = index[torch.randperm(K, generator=_random(3))]
    return GPTQWeight(
        config=GPTQConfig(4, GROUP),
        qweight=_words(0, K // 8, N),
        qzeros=(_words(1, K // GROUP, N // 8) & 0x66666666) + 0x11111111,
        scales=_scales(2, K // GROUP, N),
        g_idx=index.int(),
    )


def symmetric_gptq() -> GPTQWeight:
    """Symmetric GPTQ: every zero point 8, groups in order."""
    return gptq().holding({"qzeros": torch.full((K // GROUP, N // 8), 0x77777777, dtype=torch.int32)})


def awq() -> AWQWeight:
    """AWQ with zero points."""
    return AWQWeight(
        config=AWQConfig(group_size=GROUP),
        qweight=_words(0, K, N // 8),
        qzeros=_words(1, K // GROUP, N // 8),
        scales=_scales(2, K // GROUP, N),
    )


def ct_pack() -> CTPackWeight:
    """Symmetric packed integers of compressed-tensors, with bfloat16 scales."""
    return CTPackWeight(
        config=CTPackConfig(4, GROUP, dense=True, shape=(N, K)),
        weight_packed=_words(0, N, K // 8),
        weight_scale=_scales(2, N, K // GROUP, dtype=torch.bfloat16),
    )


def fp8() -> Fp8Weight:
    """FP8 with a scale for each block of 32 by 32."""
    values = torch.randn(N, K, generator=_random(0)).to(torch.float8_e4m3fn)
    return Fp8Weight(
        config=Fp8Config(per="block", block=(32, 32)),
        weight=values,
        weight_scale=_scales(2, N // 32, K // 32).float(),
    )


def nvfp4() -> ModelOptNVFP4Weight:
    """NVFP4 of ModelOpt, with a scale for the whole tensor."""
    return ModelOptNVFP4Weight(
        config=NVFP4Config(),
        weight=torch.randint(256, (N, K // 2), generator=_random(0)).to(torch.uint8),
        weight_scale=(torch.rand(N, K // 16, generator=_random(1)) + 0.5).to(torch.float8_e4m3fn),
        weight_scale_2=torch.tensor([0.0123]),
    )


def act_order_gptq() -> GPTQWeight:
    """GPTQ with shuffled groups."""
    return gptq(act_order=True)


# By name: a format, or a format with a variant.
SAMPLE_WEIGHTS: dict[str, Callable[[], Weight]] = {
    "gptq": symmetric_gptq,
    "gptq-zeros": gptq,
    "gptq-act-order": act_order_gptq,
    "awq": awq,
    "ct_pack": ct_pack,
    "fp8": fp8,
    "nvfp4": nvfp4,
}
