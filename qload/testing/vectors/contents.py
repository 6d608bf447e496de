"""Codes, zero points and scales that tell places apart, and plain packers; none of it is qload's own reading.

Codes count through all values, differently along K and N, so that any exchange of places changes a number.
Scales are powers of two: what a layer means is exact in every float type.
"""

import torch
from torch import Tensor

WORD = 32


def codes(N: int, K: int, bits: int) -> Tensor:
    """(N, K) int64, in [0, 2**bits)."""
    n, k = torch.arange(N)[:, None], torch.arange(K)[None]
    counted: Tensor = (5 * n + 3 * k + k // 8 + n // 16) % 2**bits
    return counted


def zeros(N: int, G: int, bits: int) -> Tensor:
    """(N, G) int64, in [1, 2**bits): none that a v1 file stores as the largest code."""
    n, g = torch.arange(N)[:, None], torch.arange(G)[None]
    counted: Tensor = 1 + (n + 3 * g) % (2**bits - 1)
    return counted


def scales(N: int, G: int) -> Tensor:
    """(N, G) float32, powers of two from 2**-6 to 2**-2."""
    n, g = torch.arange(N)[:, None], torch.arange(G)[None]
    return 2.0 ** -((n + 2 * g) % 5 + 2).float()


def act_order(K: int, group: int) -> Tensor:
    """(K,) int64: the group of each input, as many of each, none of them in a run."""
    return torch.arange(K) * 5 % (K // group)


def packed(fields: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Runs of fields of the last axis as int32 words; `order`: which field lies in each place."""
    count = WORD // bits
    runs = fields.reshape(*fields.shape[:-1], -1, count)
    places = torch.arange(count) * bits
    words = ((runs if order is None else runs[..., list(order)]) << places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def meaning(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """(N, K) float32: (code - zero) * scale, of the group of each input."""
    return (codes - zeros[:, groups]).float() * scales[:, groups]
