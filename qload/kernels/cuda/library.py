"""How operators are registered: schema, CUDA implementation and shape rule, each in one call."""

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("qload", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """`torch.ops.qload.NAME`; `schema` is what follows the name, `fake` makes its result of meta tensors."""
    LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, run, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"qload::{name}", fake, lib=LIBRARY)
