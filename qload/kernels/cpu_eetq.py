"""EETQ's layers on a CPU, as they are stored: a pair of outputs is one row of twice as many codes.

Of 64 inputs the codes of output 2i stand before those of output 2i + 1 (`qload.layouts.eetq`). So each token
becomes two, whose inputs are zero where the codes of the other output are.
"""

import torch
from torch import Tensor

from qload.devices.meaning import Meaning
from qload.formats import EETQWeight
from qload.kernels.cpu_rows import BYTE, CodeRows
from qload.layouts import eetq


def rows_of_pairs(weight: EETQWeight) -> CodeRows:
    """The bytes of contiguous codes as rows (N / 2, 2 K), less 128, without scales."""
    K, N = weight.weight.shape
    zeros = torch.full((1, 1), 2.0 ** (BYTE - 1))
    meaning = Meaning(torch.ones(1, 1), zeros, None, None, None, 2 * K, False, 1.0)
    return CodeRows(weight.weight.view(torch.uint8).view(N // 2, 2 * K), BYTE, False, meaning)


def inputs_of_pairs(x: Tensor) -> Tensor:
    """Tokens (M, K) of any type -> (2 M, 2 K), float32: of output 2i of all pairs, then of output 2i + 1."""
    M, K = x.shape
    both = torch.zeros(2, M, K // eetq.TILE, 2, eetq.TILE)
    lying = x.view(M, K // eetq.TILE, 4, 2, 4, 2).permute(0, 1, 2, 4, 5, 3)
    for u in range(2):
        both[u, :, :, u].view(lying.shape).copy_(lying)
    return both.view(2 * M, 2 * K)


def outputs_of_pairs(sums: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Float32 (2 M, N / 2) -> (M, N), scaled, plus a float32 bias, rounded once to a dtype."""
    M, pairs = sums.shape[0] // 2, sums.shape[1]
    y = sums.view(2, M, pairs).permute(1, 2, 0).reshape(M, 2 * pairs) * scales.float()
    return (y if bias is None else y.add_(bias)).to(dtype)
