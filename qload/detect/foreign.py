"""Safetensors in which other programs keep quantized weights in their own way, told by names and dtypes.

MLX: `weight` (N, K * bits / 32) uint32 beside `scales`, and `biases` but for its modes of small floats; the
config says group_size and bits under `quantization`, and never a quant_method. Source: files that mlx 0.32.4
wrote. Mistral's own FP8: `weight` beside `qscale_weight`, and params.json in the place of a config. Source:
the names that vLLM 0.11.0 maps to its own.
"""

from collections.abc import Collection

import torch

from qload.detect.files import FoundConfig
from qload.errors import UnsupportedFormatError
from qload.storage import WeightStorage

NAMED = ("quant_method", "method")
MISTRAL_SCALE = ".qscale_weight"


def refuse_foreign(found: FoundConfig | None, storage: WeightStorage) -> None:
    """UnsupportedFormatError for layers of MLX and of Mistral's own FP8, where no config names a method."""
    if found is not None and any(found.values.get(key) for key in NAMED):
        return
    names = storage.keys()
    claimed = found is not None and {"group_size", "bits"} <= found.values.keys()
    layer = _mlx_layer(names, storage, ".scales" if claimed else ".biases")
    if layer is not None:
        raise UnsupportedFormatError(
            "MLX",
            f"{layer}.weight is uint32 beside scales, which only MLX writes",
            remedy="mlx-lm loads it, and its convert with --dequantize writes plain safetensors",
        )
    scale = next((name for name in names if name.endswith(MISTRAL_SCALE)), None)
    if scale is not None and f"{scale.removesuffix(MISTRAL_SCALE)}.weight" in names:
        raise UnsupportedFormatError(
            "Mistral's own FP8",
            f"{scale} is a scale under Mistral's own name, as in consolidated*.safetensors",
            remedy="take the model's files with transformers' names; or vLLM loads these with "
            "--load-format mistral --config-format mistral",
        )


def _mlx_layer(names: Collection[str], storage: WeightStorage, beside: str) -> str | None:
    """The first layer whose weight is uint32, among those that have another tensor `beside` it."""
    for name in names:
        if name.endswith(beside):
            prefix = name.removesuffix(beside)
            weight = f"{prefix}.weight"
            if f"{prefix}.scales" in names and weight in names and storage.info(weight).dtype == torch.uint32:
                return prefix
    return None
