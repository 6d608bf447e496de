"""Model of transformers with kernels and exact products in its quantized layers.

transformers is imported by the first model.
"""

from collections.abc import Iterator
from os import PathLike

import torch
from torch import Tensor

from qload.verify.logits.compared_layers import ComparedLinear
from qload.verify.logits.compared_model import ComparedModel, LayerFactory, ModelPrompt


class ComparedTransformersModel(ComparedModel):
    """Model of transformers; its plain layers are computed as they are."""

    def layer_paths(self) -> Iterator[str]:
        """Yield the paths of all quantized linear layers, and of the modules with quantized experts.

        Of experts that their class computes, the layers of each expert.
        """
        from qload.engines.transformers.operands import ClassExperts, MatrixSlot
        from qload.engines.transformers.placeholder_layers import LinearSlot, TypedExperts

        for path, module in self.model.named_modules():
            if isinstance(module, LinearSlot):
                yield path
            elif isinstance(module, TypedExperts):
                yield path.rpartition(".")[0]
            elif isinstance(module, ClassExperts | MatrixSlot):
                for name, layer in module.named_modules():
                    if isinstance(layer, ComparedLinear):
                        yield f"{path}.{name}"

    def compute_logits(self, prompt: ModelPrompt) -> Tensor:
        """Compute the logits of all ids in one pass, and those of the first id again in a pass of its own."""
        from qload.engines.transformers.generation import refusals_as_config_error

        ids = torch.tensor([prompt.ids], device=self.model.device)
        with refusals_as_config_error(prompt.config.type):
            first, logits = (
                self.model(input_ids=some, use_cache=False).logits[0] for some in (ids[:, :1], ids)
            )
        return torch.cat([first, logits[1:]])


def load_transformers(
    path: str | PathLike[str], model_type: str, device: str, dtype: torch.dtype, factory: LayerFactory
) -> ComparedTransformersModel:
    """Load the model of a checkpoint with layers of a `factory`; errors as of `load`, and ConfigError."""
    from qload.engines.transformers import load
    from qload.engines.transformers.config import QloadConfig
    from qload.engines.transformers.generation import refusals_as_config_error

    config = QloadConfig(target=None, nonfinite="allow", make=factory.linear, make_experts=factory.experts)
    with refusals_as_config_error(model_type):
        model = load(path, dtype=dtype, device_map=device, quantization_config=config)
    return ComparedTransformersModel(model.eval(), factory.state, dtype)
