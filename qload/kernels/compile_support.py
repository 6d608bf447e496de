"""Functions for traced models alone; an import brings in all of torch's compiler, for seconds."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qload.kernels.plans import known, multiply


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def facts(key: str) -> tuple[tuple[str, ...], int, int, bool]:
    """Names of tensors, N, K, and whether torch's own product is all there is to do."""
    signature = known(key)
    return signature.names, signature.blueprint.layer.N, signature.blueprint.layer.K, signature.plain


def _linear(call: Any, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    return multiply(x, call.typed(tensors), bias, call.activations, call.maximum)


def _experts(module: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    y: Tensor = module.eagerly(x, topk_ids, topk_weights)
    return y


# A graph breaks there, or with `fullgraph` is refused with this reason.
linear_eagerly: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _linear, reason="a function finds the largest input of all ranks"
)
experts_eagerly: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _experts, reason="gradients of experts, and the largest input of all ranks, are found eagerly"
)
