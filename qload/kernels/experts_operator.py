"""`qload::experts_layer`: the experts of any layer as one node of a traced model.

    qload::experts_layer(x (..., H), topk_ids (T, k), topk_weights (T, k), tensors, key) -> (..., H)

As `qload::linear`, which says why a key. It has no gradients: where some are wanted a graph breaks.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels.cuda.library import LIBRARY

Run = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], Tensor]
NAME = "experts_layer"
_KNOWN: dict[str, Run] = {}  # by key, for as long as the process runs: graphs hold the keys


def share(facts: str, run: Run) -> str:
    """The key of experts of which `facts` tells all but the names; `run` multiplies with their tensors."""
    key = f"experts {sha256(facts.encode()).hexdigest()[:24]}"
    _KNOWN.setdefault(key, run)
    return key


def _experts(x: Tensor, ids: Tensor, weights: Tensor, held: Sequence[Tensor], meaning: str) -> Tensor:
    if meaning not in _KNOWN:
        raise ArgumentError("meaning", "that of experts that this process has made", repr(meaning))
    return _KNOWN[meaning](x, ids, weights, held).contiguous()


def _experts_of_shapes(
    x: Tensor, ids: Tensor, weights: Tensor, held: Sequence[Tensor], meaning: str
) -> Tensor:
    return x.new_empty(x.shape)


LIBRARY.define(  # type: ignore[no-untyped-call]
    f"{NAME}(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] held, str meaning) -> Tensor"
)
LIBRARY.impl(NAME, _experts, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(f"qload::{NAME}", _experts_of_shapes, lib=LIBRARY)


def experts_layer(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, held: Sequence[Tensor], meaning: str
) -> Tensor:
    """The operator, whose arguments stand above."""
    y: Tensor = torch.ops.qload.experts_layer(x, topk_ids, topk_weights, list(held), meaning)
    return y
