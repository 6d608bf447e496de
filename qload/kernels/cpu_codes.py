"""Exact sums of codes of 8 bits on a CPU, by the CPU module; `csrc/cpu/codes.h` says what they are."""

import torch
from torch import Tensor

from qload.devices.tensors import is_plain
from qload.native import is_on, isa, load, threads

MOST = 1 << 16  # codes of a row: an int32 holds sums of fewer


def sums_of_codes(x: Tensor, codes: Tensor) -> Tensor | None:
    """Inputs (M, K) times the codes of a weight (N, K), int8 both: int32 (M, N).

    None where the module does not take them.
    """
    module = load("cpu").found
    if module is None or not is_on() or torch.compiler.is_compiling():
        return None
    if not (is_plain(x, "cpu") and is_plain(codes, "cpu") and x.dtype == codes.dtype == torch.int8):
        return None
    (M, K), N = x.shape, codes.shape[0]
    if not 0 < K < MOST or codes.stride(1) != 1:
        return None
    x, sums = x.contiguous(), x.new_empty(M, N, dtype=torch.int32)
    at = codes.data_ptr(), codes.stride(0), sums.data_ptr()
    module.multiply_codes(isa(), (M, K, N), x.data_ptr(), *at, threads())
    return sums
