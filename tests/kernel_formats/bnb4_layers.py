"""Layers of nf4 and fp4 with given codes and scales, and their repack to strips."""

from typing import Any

import torch
from torch import Tensor

from qload.formats import BNB4Config, BNB4Weight, BNBFP4Weight, BNBNF4Weight
from qload.kernel_formats import TableStripsWeight, repack
from qload.layouts import fp4
from qload.layouts.bnb import TABLES


def bnb4(
    codes: Tensor, absmax: Tensor, kind: Any = "nf4", blocksize: int = 64, storage: torch.dtype = torch.uint8
) -> BNB4Weight:
    """Build a layer of `codes` (N, K), stored as a dtype."""
    weight_type: Any = BNBNF4Weight if kind == "nf4" else BNBFP4Weight
    pairs = fp4.pack(codes.long().reshape(-1, 2).flip(1).reshape(1, -1))  # the first of two in the high bits
    weight: BNB4Weight = weight_type(
        config=BNB4Config(kind, blocksize, storage=storage, K=codes.shape[1]),
        weight=pairs.reshape(-1, 1).contiguous().flatten().view(storage).reshape(-1, 1),
        absmax=absmax,
        quant_map=torch.tensor(TABLES[kind]),
    )
    return weight


def pack(weight: BNB4Weight) -> TableStripsWeight:
    packed = repack(weight, "strips")
    assert isinstance(packed, TableStripsWeight)
    return packed
