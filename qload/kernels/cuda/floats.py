"""Few tokens times rows of float32 on a CUDA device, each weight read once: y = x w^T + bias.

Where a weight is dequantized to float32 in slices, the vendor's product of a slice takes nearly as long as
that of all, which few tokens would wait for again and again.
"""

import torch
from torch import Tensor

from qload.devices.cuda import module_for, on_device, stream
from qload.devices.tensors import address

MOST_TOKENS = 16


def multiply(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """y (M, N) = x (M, K) times w (N, K), plus bias (N,), all float32, and so the sums.

    False: not of this size, type or place, and nothing was done. A token has the same bits beside any other.
    """
    M, K = x.shape
    given = [y, x, w] if bias is None else [y, x, w, bias]
    if M > MOST_TOKENS or not x.is_cuda or any(each.dtype != torch.float32 for each in given):
        return False
    whole = x.is_contiguous() and w.is_contiguous() and (bias is None or bias.is_contiguous())
    module = module_for(*given)
    if module is None or not whole or y.stride(1) != 1:
        return False
    with on_device(y.device):
        sizes, pitch = (M, w.shape[0], K), y.stride(0)
        return bool(
            module.multiply_floats(
                x.data_ptr(), w.data_ptr(), address(bias), y.data_ptr(), (*sizes, pitch), stream(y)
            )
        )
