"""Lawful calls of functions that check sizes of tensors, with sizes unlike each other."""

from collections.abc import Callable
from typing import Any

import torch

from qload.models.attention import attend_with_bias, mask_bias

S, QUERIES, KEYS, HEADS, KV, SIZE = 2, 3, 5, 6, 2, 8  # of attention

FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attend_with_bias": (
        attend_with_bias,
        {
            "q": torch.ones(S, QUERIES, HEADS, SIZE),
            "k": torch.ones(S, KEYS, KV, SIZE),
            "v": torch.ones(S, KEYS, KV, SIZE),
            "bias": torch.zeros(S, 1, QUERIES, KEYS),
            "scale": 0.5,
        },
    ),
    "mask_bias": (
        mask_bias,
        {"positions": torch.arange(6).view(2, 3), "keys": 5, "dtype": torch.float32, "window": 2, "chunk": 3},
    ),
}
