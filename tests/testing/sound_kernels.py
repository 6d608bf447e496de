"""Typed weights of several formats with random content, and a plain kernel for each, to plant faults in."""

import torch
from torch import Tensor

from qload import (
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
    Weight,
)

N, K, GROUP = 64, 256, 32


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(seed: int, *shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=_random(seed), dtype=torch.int32)


def scales(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (0.01 + 0.03 * torch.rand(shape, generator=_random(seed))).to(dtype)


def gptq(act_order: bool = False, offset: int = 1) -> GPTQWeight:
    index = torch.arange(K) // GROUP
    if act_order:
        index = index[torch.randperm(K, generator=_random(3))]
    return GPTQWeight(
        config=GPTQConfig(4, GROUP),
        qweight=words(0, K // 8, N),
        qzeros=words(1, K // GROUP, N // 8) & 0x77777777,
        scales=scales(2, K // GROUP, N),
        g_idx=index.int(),
    )


def symmetric_gptq() -> GPTQWeight:
    return gptq().holding({"qzeros": torch.full((K // GROUP, N // 8), 0x77777777, dtype=torch.int32)})


def awq() -> AWQWeight:
    return AWQWeight(
        config=AWQConfig(group_size=GROUP),
        qweight=words(0, K, N // 8),
        qzeros=words(1, K // GROUP, N // 8),
        scales=scales(2, K // GROUP, N),
    )


def ct_pack() -> CTPackWeight:
    return CTPackWeight(
        config=CTPackConfig(4, GROUP, dense=True, shape=(N, K)),
        weight_packed=words(0, N, K // 8),
        weight_scale=scales(2, N, K // GROUP, dtype=torch.bfloat16),
    )


def fp8() -> Fp8Weight:
    weight = torch.randn(N, K, generator=_random(0)).to(torch.float8_e4m3fn)
    return Fp8Weight(
        config=Fp8Config(per="block", block=(32, 32)),
        weight=weight,
        weight_scale=scales(2, N // 32, K // 32).float(),
    )


def nvfp4() -> ModelOptNVFP4Weight:
    return ModelOptNVFP4Weight(
        config=NVFP4Config(),
        weight=torch.randint(256, (N, K // 2), generator=_random(0)).to(torch.uint8),
        weight_scale=(torch.rand(N, K // 16, generator=_random(1)) + 0.5).to(torch.float8_e4m3fn),
        weight_scale_2=torch.tensor([0.0123]),
    )


SOUND: dict[str, Weight] = {
    "gptq": gptq(),
    "gptq-symmetric": symmetric_gptq(),
    "gptq-act-order": gptq(act_order=True),
    "awq": awq(),
    "ct-pack": ct_pack(),
    "fp8-block": fp8(),
    "nvfp4": nvfp4(),
}
