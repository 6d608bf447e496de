"""The vendor's products with sums in float32, whatever a program allows for its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

REDUCED = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
NARROW = "allow_fp16_accumulation"


@contextmanager
def in_float32() -> Iterator[None]:
    """No partial sum is rounded to 16 bits inside; settings are a program's, so that other threads see it."""
    flags: Any = torch.backends.cuda.matmul
    held = {name: _setting(flags, name) for name in (*REDUCED, NARROW) if hasattr(flags, name)}
    for name, was in held.items():
        setattr(flags, name, (False, was[1]) if isinstance(was, tuple) else False)
    try:
        yield
    finally:
        for name, was in held.items():
            setattr(flags, name, was)


def _setting(flags: Any, name: str) -> Any:
    """As it is set again; newer torch keeps with it whether K may be split at all."""
    split = getattr(flags, f"{name}_split_k", None)
    return getattr(flags, name) if split is None else (getattr(flags, name), split)
