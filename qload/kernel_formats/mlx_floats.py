"""MLX's modes of floats in the intermediate forms of `qload.kernel_formats.repack`, and back bit for bit.

    mxfp4, nvfp4   `Fp4`; nvfp4 has no second scale, as if it were 1
    mxfp8          `MXFP8Weight`

Words of MLX are the bytes of other formats.
"""

import torch

from qload.dtypes import TORCH
from qload.formats import MLXFloatWeight, MXFP8Weight, nvfp4
from qload.kernel_formats.fp4_marlin import CODE_PACKING, MLX_TENSOR_NAMES, Fp4
from qload.spec import Weight
from qload.spec.integers import Origin, record_origin


def read_fp4(weight: MLXFloatWeight) -> Fp4:
    """Convert a weight of the modes mxfp4 and nvfp4."""
    mode, scales, second = weight.config.mode, weight.scales, None
    if mode == "nvfp4":
        scales = scales.view(TORCH[nvfp4.E4M3FN])
        second = torch.ones(len(weight.layer.parts), device=weight.device)
    words = weight.weight.contiguous().view(torch.int32)
    return Fp4(
        MLX_TENSOR_NAMES[mode],
        lambda: CODE_PACKING.packed(words).T,
        scales,
        second,
        None,
        record_origin(weight),
    )


def restore_fp4(floats: Fp4, origin: Origin) -> Weight:
    """Invert `read_fp4`."""
    words = CODE_PACKING.pack(floats.unpack().T).view(torch.uint32)
    scales = floats.scales.view(torch.uint8)
    return MLXFloatWeight(config=origin.config, weight=words, scales=scales, layer=floats.layer)


def read_mxfp8(weight: MLXFloatWeight) -> MXFP8Weight:
    """Convert a weight of the mode mxfp8."""
    return MXFP8Weight(
        config=MXFP8Weight.example,
        weight=weight.weight.contiguous().view(torch.float8_e4m3fn),
        weight_scale=weight.scales,
        layer=record_origin(weight),
    )


def restore_mxfp8(weight: MXFP8Weight, origin: Origin) -> Weight:
    """Invert `read_mxfp8`."""
    words = weight.weight.view(torch.uint32)
    return MLXFloatWeight(config=origin.config, weight=words, scales=weight.weight_scale, layer=weight.layer)
