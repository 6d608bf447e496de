"""Names and shapes of a model's checkpoint, from a model without memory for its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.pytorch_utils import Conv1D

from tests.model_tables.draw import Changes, flatten, make_config

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sample:
    """A config and the checkpoint of its model.

    Attributes
    ----------
    changes
        Changed fields.
    config
        Content of config.json.
    flat
        Its fields by dotted name.
    shapes
        Shapes of the stored tensors by name.
    transposed
        Names of matrices with inputs first, (K, N).
    """

    changes: Changes
    config: Mapping[str, Any]
    flat: Mapping[str, Any]
    shapes: Shapes
    transposed: frozenset[str]


def build_sample(model_class: type[PreTrainedModel], changes: Changes) -> Sample:
    """Build a model on the meta device, and return what `save_pretrained` would write."""
    config = make_config(model_class.config_class, changes)
    model = build_model(model_class, config)
    config.architectures = [model_class.__name__]
    stored = config.to_dict()
    return Sample(changes, stored, flatten(stored), stored_shapes(model), transposed_names(model))


def build_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device, with its ties."""
    with torch.device("meta"):
        with no_init_weights():
            model = model_class(config)
        model.tie_weights()
    return model


def stored_shapes(model: PreTrainedModel) -> Shapes:
    """Return the names and shapes of a checkpoint: without ties, with transformers' conversions reverted."""
    state = dict(model.state_dict())
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    state = revert_weight_conversion(model, state)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def stored_name(model: PreTrainedModel, module: Module) -> str | None:
    """Return the stored name of a module's weight; None for another module than one with a weight."""
    found = next((name for name, member in model.named_modules() if member is module), None)
    if found is None or not isinstance(getattr(module, "weight", None), torch.Tensor):
        return None
    return min(revert_weight_conversion(model, {f"{found}.weight": module.weight}), default=None)


def transposed_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of matrices with inputs first, (K, N)."""
    names = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)]
    state = {name: model.get_parameter(name) for name in names}
    return frozenset(revert_weight_conversion(model, state)) if state else frozenset()
