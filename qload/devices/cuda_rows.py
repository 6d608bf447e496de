"""Weights on a CUDA device whose codes lie in bytes row by row: eight a lane, at the speed of memory."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qload.devices.operands import StoredRows, StoredSparse
from qload.devices.tensors import FLOATS, address

UNSIGNED, SIGNED, LOOKED, PAIRS, PAIRS_TURNED, HALVES, SPARSE = range(7)  # how codes lie, see rows.cuh
NUMBERS, E4M3, E5M2, E2M1, SIGNED4 = range(5)  # what they are, see meaning.h
E8M0 = 3  # a type of scales after those of `FLOATS`
IN_PLACE = 0x543210  # columns of scales are not permuted
NO_ZEROS, CONSTANT, _, INT32 = range(4)
FOUR_BITS = {"e2m1": E2M1, "int4": SIGNED4}
BYTES = {
    torch.uint8: (UNSIGNED, NUMBERS),
    torch.int8: (SIGNED, NUMBERS),
    torch.float8_e4m3fn: (LOOKED, E4M3),
    torch.float8_e5m2: (LOOKED, E5M2),
}
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


def rows(
    cuda: ModuleType, stored: StoredRows, out: Tensor, start: int, factors: Tensor | None, stream: int
) -> bool:
    """The outputs from `start` on, each input times its factor (K,) in float32; False: nothing was done."""
    found = _source(stored)
    scales, across = stored.scales, 2 if stored.across else 1
    if found is None or stored.codes.stride(1) != 1 or start % across or not _starts(stored, start):
        return False
    (source, values), codes = found, stored.codes[start // across :]
    made, zeros = _meaning(cuda, scales, stored.zeros, stored.n_run, stored.k_run, start)
    made.values, made.divide, made.factor, made.factors = (
        values,
        stored.divide,
        stored.factor,
        address(factors),
    )
    return _run(cuda, source, (codes, None), made, zeros, out, stream)


def sparse(cuda: ModuleType, stored: StoredSparse, kept: Tensor, out: Tensor, stream: int) -> bool:
    """What a weight means of which `kept` (N, K / 4) holds two of every four codes, two a byte."""
    places = stored.places().contiguous().view(torch.uint8)
    made, zeros = _meaning(cuda, stored.scales, None, 1, stored.run, 0)
    made.zeros_kind, made.zero = CONSTANT, 8
    return _run(cuda, SPARSE, (kept, places), made, zeros, out, stream)


def _source(stored: StoredRows) -> tuple[int, int] | None:
    if stored.four_bits is None:
        return BYTES.get(stored.codes.dtype)
    return HALVES if stored.across else PAIRS, FOUR_BITS[stored.four_bits]


def _starts(stored: StoredRows, start: int) -> bool:
    """Whether scales and zero points of outputs from `start` on begin with a row of theirs."""
    return stored.scales.shape[0] == 1 or start % stored.n_run == 0


def _meaning(
    cuda: Any, scales: Tensor, zeros: Tensor | None, n_run: int, k_run: int, start: int
) -> tuple[Any, Tensor | None]:
    """What the module calls a meaning of outputs from `start` on, and what has to live until it was read."""
    made, first = cuda.Meaning(), 0 if scales.shape[0] == 1 else start // n_run
    scales = scales[first:]
    made.scales, made.scale_type = address(scales), _type(scales)
    made.scale_n, made.scale_k = _strides(scales)
    made.scale_places = made.zero_places = IN_PLACE
    made.zeros_kind, made.zero, made.zeros, made.zero_n, made.zero_k = NO_ZEROS, 0, 0, 0, 0
    made.zero_bits, made.zero_word, made.zero_add, made.zero_mask = 4, 0, 0, -1
    made.n_table = made.k_table = made.lookup = made.values = made.factors = 0
    made.n_run, made.k_run, made.divide, made.factor = n_run, k_run, False, 1.0
    if zeros is not None:
        zeros = zeros[first:].to(torch.int32)
        made.zeros_kind, made.zeros = INT32, address(zeros)
        made.zero_n, made.zero_k = _strides(zeros)
    return made, zeros


def _type(scales: Tensor) -> int:
    return E8M0 if scales.dtype in EXPONENTS else FLOATS.index(scales.dtype)


def _strides(table: Tensor) -> tuple[int, int]:
    """Of rows and columns, 0 where there is one."""
    rows, columns = (0 if size == 1 else step for size, step in zip(table.shape, table.stride(), strict=True))
    return rows, columns


def _run(
    cuda: Any,
    source: int,
    read: tuple[Tensor, Tensor | None],
    made: Any,
    kept: object,
    out: Tensor,
    stream: int,
) -> bool:
    codes, places = read
    apart = 0 if places is None else places.stride(0)
    at = *out.shape, FLOATS.index(out.dtype), out.data_ptr(), stream
    with torch.cuda.device(out.device):
        done = cuda.dequantize_rows(
            source, codes.data_ptr(), codes.stride(0), address(places), apart, made, *at
        )
    del kept  # what the kernel reads lived until its launch
    return bool(done)
