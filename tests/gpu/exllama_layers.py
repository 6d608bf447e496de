"""Layers in ExLlama's order for kernels to multiply: small ones, of every kind, on the device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import ExllamaWeight, repack
from qload.kernels.cuda import exllama
from qload.layouts import (
    STORED_MINUS_ONE,
    Stored,
    StoredMinusOnePerField,
    StoredMinusOneUnmasked,
    ZeroPoints,
    gptq,
)

Kind = dict[str, Any]
STORED, PER_FIELD, UNMASKED = Stored(), StoredMinusOnePerField(), StoredMinusOneUnmasked()
BITS = pytest.mark.parametrize("bits", [2, 3, 4, 8], ids=lambda bits: f"{bits} bits")
TOKENS = pytest.mark.parametrize("M", [1, 2, 7, 8, 9, 16, 17, 33, 64, 65])
LAYERS = [
    pytest.param({"K": 32, "N": 32, "group": -1, "zeros": STORED}, id="one step"),
    pytest.param({"K": 1056, "N": 160, "group": 16}, id="groups of 16"),
    pytest.param({"K": 1056, "N": 96, "group": 32, "zeros": UNMASKED}, id="groups of 32, unmasked"),
    pytest.param({"K": 1056, "N": 160, "group": 48, "act_order": True}, id="groups of 48, act order"),
    pytest.param({"K": 1088, "N": 96, "group": 64, "zeros": PER_FIELD}, id="groups of 64, per field"),
    pytest.param({"K": 1056, "N": 160, "group": 96, "zeros": STORED}, id="groups of 96, stored"),
    pytest.param({"K": 1152, "N": 256, "group": 128}, id="groups of 128"),
    pytest.param({"K": 1120, "N": 224, "group": 128, "act_order": True}, id="groups of 128, act order"),
    pytest.param({"K": 1152, "N": 96, "group": 192, "zeros": STORED}, id="groups of 192, stored"),
    pytest.param({"K": 1280, "N": 96, "group": 256, "act_order": True}, id="groups of 256, act order"),
    pytest.param({"K": 4128, "N": 64, "group": -1}, id="one scale a column"),
]
KINDS = pytest.mark.parametrize("kind", LAYERS)


@cache
def layer(
    K: int,
    N: int,
    group: int,
    bits: int = 4,
    dtype: torch.dtype = torch.float16,
    *,
    zeros: ZeroPoints = STORED_MINUS_ONE,
    act_order: bool = False,
    exact: bool = False,
    unit: float = 1.0,
) -> ExllamaWeight:
    """Random codes; `exact`: scales that are powers of two; `unit`: what scales are multiplied with."""
    make = torch.Generator().manual_seed(K + N)
    groups = 1 if group == -1 else -(-K // group)
    lowest, highest = zeros.span(bits)
    scales = 2.0 ** torch.randint(-3, 0, (groups, N), generator=make)
    if not exact:
        scales = (torch.rand(groups, N, generator=make) * 0.02 + 0.001) * unit
    g_idx = torch.arange(K) // (K if group == -1 else group)
    if act_order:
        g_idx = g_idx[torch.randperm(K, generator=make)]
    points = torch.randint(lowest, highest + 1, (groups, N), generator=make)
    weight = GPTQWeight(
        config=GPTQConfig(bits, group, zeros=zeros),
        qweight=gptq.rows(bits).pack(torch.randint(2**bits, (K, N), generator=make)),
        qzeros=zeros.write(points, gptq.columns(bits)),
        scales=scales.to(dtype),
        g_idx=g_idx.to(torch.int32),
    )
    made = repack(weight, "exllama").to("cuda")
    assert isinstance(made, ExllamaWeight)
    assert (made.q_perm is not None) == act_order
    return made


def kernel(
    weight: ExllamaWeight, bias: Tensor | None = None, name: str = "few"
) -> Callable[[Tensor], Tensor]:
    """As many tokens at a time as the kernel takes."""
    return lambda x: torch.cat([exllama.linear(each, weight, bias, kernel=name) for each in x.split(64)])


def call(x: Tensor, weight: ExllamaWeight) -> exllama.ExllamaCall:
    """What a kernel gets of x and a weight."""
    return exllama.ExllamaCall(*exllama.arguments(x, weight))
