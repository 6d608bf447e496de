"""What a model says of its size, with the layers whose weights are no parameters."""

from functools import partial
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from qload.engines.transformers.experts import TypedExperts
from qload.engines.transformers.slots import LinearSlot


def num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """How many numbers the layers of a model mean: of a quantized matrix N times K of the whole layer."""
    count: int = PreTrainedModel.num_parameters(model, only_trainable, exclude_embeddings)
    if only_trainable:
        return count
    for module in model.modules():
        if isinstance(module, LinearSlot):
            count += module.out_features * module.in_features
        elif isinstance(module, TypedExperts):
            count += module.count
    return count


def count_truly(model: Any) -> None:
    """Let `model.num_parameters()`, and that of copies, count quantized layers.

    The memory footprint counts buffers as it is.
    """
    model.num_parameters = partial(num_parameters, model)
