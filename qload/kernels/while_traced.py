"""What only a traced model needs; importing it brings in all of torch's compiler, which takes seconds."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qload.kernels import reference
from qload.kernels.meaning import known


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def facts(meaning: str) -> tuple[tuple[str, ...], int, int, bool]:
    """Names of tensors, N, K, and whether torch's own product is all that there is to do."""
    found = known(meaning)
    plain = found.blueprint.plain and not reference.quantizes(found.blueprint, found.activations)
    return found.names, found.blueprint.layer.N, found.blueprint.layer.K, plain


def _linear(call: Any, x: Tensor, held: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    return reference.linear(x, call.typed(held), bias, call.activations, call.maximum)


def _experts(module: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    made: Tensor = module.eagerly(x, topk_ids, topk_weights)
    return made


# A graph breaks there, or with `fullgraph` is refused with this reason.
linear_eagerly: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _linear, reason="a function finds the largest input of all ranks"
)
experts_eagerly: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _experts, reason="gradients of experts, and the largest input of all ranks, are found eagerly"
)
