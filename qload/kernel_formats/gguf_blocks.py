"""Blocks of GGUF in the intermediate forms of `qload.kernel_formats.repack`, and back bit for bit.

    Q4_0, Q8_0     plain integers in groups of 32, with scales in float16
    MXFP4, NVFP4   `Fp4`: e2m1 codes, with bytes of scales as other formats store them

ggml halves both kinds of byte scales and doubles the values of codes, so that their products are equal.
"""

import torch

from qload import devices
from qload.dtypes import TORCH
from qload.formats import GGUFWeight, nvfp4
from qload.formats.gguf import FLOAT_TYPES, INTEGER_TYPES
from qload.kernel_formats.fp4_marlin import GGUF_TENSOR_NAMES, Fp4
from qload.layouts import ggml
from qload.spec import Weight
from qload.spec.integers import Origin, record_origin
from qload.storage import BLOCK_TYPES

OFFSETS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
FINE_GROUPS = ("Q3_K", "Q6_K")


def describe_unsupported(kind: str) -> str:
    """Return the reason why blocks of a type other than those of the module are not repacked."""
    if kind in OFFSETS:
        property_ = "have an offset in float32 for each group"
    elif kind in FINE_GROUPS:
        property_ = "have a scale in float32 for 16 inputs"
    else:
        property_ = "are values of a table, or have other bits than 4 and 8"
    return f"weights of {kind} {property_}; {', '.join((*INTEGER_TYPES.values(), *FLOAT_TYPES))} are repacked"


def read_floats(weight: GGUFWeight) -> Fp4:
    """Convert a weight of MXFP4 or NVFP4."""
    kind, N = weight.config.type, weight.layer.N
    names, second = GGUF_TENSOR_NAMES[kind], weight.scale
    scales = weight.blocks[..., : BLOCK_TYPES[kind].elements // names.group_size].reshape(N, -1)
    if names.second_scale:
        scales = scales.view(TORCH[nvfp4.E4M3FN])
        second = torch.ones(len(weight.layer.parts), device=weight.device) if second is None else second
    layer = record_origin(weight, stores_zeros=weight.scale is not None)
    return Fp4(names, lambda: weight.codes().plain().T, scales, second, None, layer)


def restore_floats(floats: Fp4, origin: Origin) -> Weight:
    """Invert `read_floats`."""
    kind = origin.config.type
    codes, scales = devices.plain(floats.unpack()).T.to(torch.uint8), floats.scales.view(torch.uint8)
    return GGUFWeight(
        config=origin.config,
        blocks=ggml.encode(kind, codes, scales, BLOCK_TYPES[kind].elements),
        scale=floats.second_scale if origin.stores_zeros else None,
        layer=floats.layer,
    )
