"""MXFP4 of other programs, rewritten bit for bit as `weight_packed` and `weight_scale` of compressed-tensors.

MLX stores the same bytes as words. A block of GGUF has the codes of inputs 0 to 15 in the low halves of its
bytes. An exponent of 255 is 2**127 in GGUF and NaN elsewhere.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qload.conversion.output_files import OutputItem, item_from_tensors, layer_bytes, load_layer
from qload.errors import RepackError
from qload.formats import CTMXFP4Weight, GGUFWeight, MLXFloatWeight
from qload.loader import LayerDescription
from qload.spec import Weight, named
from qload.verify.checkpoint import VerifiedCheckpoint

NAME = "mxfp4"
GROUP, NAN_EXPONENT = 32, 255
WEIGHTS: Mapping[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": GROUP,
    "symmetric": True,
    "scale_dtype": "torch.uint8",
    "dynamic": False,
}  # fmt: skip  entry of a config group of compressed-tensors


def why_not_mxfp4(layer: LayerDescription) -> str | None:
    """Return why a layer cannot become MXFP4 of compressed-tensors without loss, or None."""
    weight_type, config = layer.format.weight_type, layer.format.config
    if layer.transforms is not None:
        return f"it transforms its {layer.transforms} at run time, which {NAME} cannot express"
    if layer.format.activations is not None:
        return f"its inputs are quantized ({layer.format.activations}), which {NAME} cannot express"
    if weight_type is MLXFloatWeight and getattr(config, "mode", "") == "mxfp4":
        return None
    if weight_type is GGUFWeight and getattr(config, "type", "") == "MXFP4":
        return None
    if weight_type is CTMXFP4Weight:
        return None
    return f"{weight_type.format} is not MXFP4, and convert does not quantize"


def mxfp4_item(source: VerifiedCheckpoint, layer: LayerDescription) -> OutputItem:
    """Return the output tensors of a layer; RepackError if it is not MXFP4, or an exponent is 255 in GGUF."""
    reason = why_not_mxfp4(layer)
    if reason:
        raise RepackError(layer.format.weight_type.format, NAME, reason)
    outline = {
        named(layer.prefix, name): torch.zeros((), dtype=torch.uint8).expand(layer.N, width)
        for name, width in (("weight_packed", layer.K // 2), ("weight_scale", layer.K // GROUP))
    }
    mxfp4_tensors(load_layer(source, layer.prefix))  # raises for an exponent of 255
    source_bytes = layer_bytes(source.weights, layer)
    return item_from_tensors(outline, source_bytes, lambda: mxfp4_tensors(load_layer(source, layer.prefix)))


def mxfp4_tensors(weight: Weight) -> dict[str, Tensor]:
    """Return codes (N, K/2) and exponents (N, K/32) of an MXFP4 layer by full name."""
    N = weight.layer.N
    if isinstance(weight, GGUFWeight):
        exponents, halves = weight.blocks[..., 0].contiguous(), weight.blocks[..., 1:]
        if bool((exponents == NAN_EXPONENT).any()):
            n, group = torch.nonzero(exponents == NAN_EXPONENT)[0].tolist()
            reason = f"the exponent of output {n}, group {group} is 255: 2**127 in GGUF, and NaN in {NAME}"
            raise RepackError(weight.format, NAME, reason)
        codes = torch.cat((halves & 15, halves >> 4), -1)
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(N, -1)
    elif isinstance(weight, MLXFloatWeight):
        packed, exponents = weight.weight.view(torch.uint8), weight.scales
    else:
        assert isinstance(weight, CTMXFP4Weight)
        packed, exponents = weight.weight_packed.view(torch.uint8), weight.exponents
    tensors = {"weight_packed": packed, "weight_scale": exponents}
    return {named(weight.layer.name, name): tensor for name, tensor in tensors.items()}
