"""The layers that linears are timed on: Llama 3 8B and 70B, fresh random weights."""

import torch
from torch import Tensor

from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import repack
from qload.layouts import Stored, gptq
from qload.spec import Weight

SHAPES = [  # K, N
    (4096, 4096),
    (4096, 6144),
    (4096, 28672),
    (14336, 4096),
    (8192, 8192),
    (8192, 57344),
    (28672, 8192),
]
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]


def words(*shape: int) -> Tensor:
    """Random int32."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")


def checkpoint(
    K: int, N: int, bits: int, group: int, zeros: bool = False, dtype: torch.dtype = torch.float16
) -> GPTQWeight:
    """A GPTQ layer; group -1: one scale a column. `zeros`: random zero points, else all are the middle."""
    groups = 1 if group == -1 else K // group
    middle = 2 ** (bits - 1)
    lowest, highest = (0, 2**bits) if zeros else (middle, middle + 1)
    points = torch.randint(lowest, highest, (groups, N), device="cuda")
    return GPTQWeight(
        config=GPTQConfig(bits, group, zeros=Stored(), positional=groups > 1),
        qweight=words(K * bits // 32, N),
        qzeros=Stored().write(points, gptq.columns(bits)),
        scales=(torch.rand(groups, N, device="cuda") * 0.02 + 0.001).to(dtype),
        g_idx=torch.arange(K, device="cuda", dtype=torch.int32) // (K if group == -1 else group),
    )


def layers(
    layout: str,
    K: int,
    N: int,
    bits: int,
    group: int,
    count: int,
    zeros: bool = False,
    dtype: torch.dtype = torch.float16,
) -> list[Weight]:
    """As many layers as are rotated, in a layout."""
    return [repack(checkpoint(K, N, bits, group, zeros, dtype), layout) for _ in range(count)]
