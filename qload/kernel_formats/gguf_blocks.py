"""Blocks of GGUF in the intermediate forms of `qload.kernel_formats.repack`, and back bit for bit.

    Q4_0, Q8_0         plain integers in groups of 32, with scales in float16
    Q4_1, Q5_0, Q5_1   the same, of 4 or 5 bits, with offsets in float16
    Q2_K to Q6_K       integers in groups of 16 or 32, with scales and offsets in float32, and a header
    MXFP4, NVFP4       `Fp4`: e2m1 codes, with bytes of scales as other formats store them

A scale of a K type is the product of a float16 and a small integer, which a float32 holds exactly; the header
has both. ggml halves both kinds of byte scales and doubles the values of codes, so that their products are
equal.
"""

from dataclasses import replace

import torch

from qload import devices
from qload.dtypes import TORCH
from qload.formats import GGUFWeight, nvfp4
from qload.formats.gguf import FLOAT_TYPES, INTEGER_TYPES
from qload.kernel_formats.fp4_marlin import GGUF_TENSOR_NAMES, Fp4
from qload.layouts import ggml
from qload.spec import Weight
from qload.spec.integers import Integers, Origin, from_codes, record_origin
from qload.storage import BLOCK_TYPES

FLOAT16_TYPES = ("Q4_1", "Q5_0", "Q5_1")  # of scales and offsets
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
OFFSET_TYPES = (*FLOAT16_TYPES, *K_TYPES)  # of `KernelIntegers`
REPACKED = (*INTEGER_TYPES.values(), *OFFSET_TYPES, *FLOAT_TYPES)


def describe_unsupported(kind: str) -> str:
    """Return the reason why blocks of a type other than those of the module are not repacked."""
    return f"weights of {kind} are values of a table, or have 1 or 2 bits; {', '.join(REPACKED)} are repacked"


def read_integers(weight: GGUFWeight) -> Integers:
    """Convert a weight of Q4_1, Q5_0, Q5_1 or a K type."""
    kind, (N, K), codes = weight.config.type, weight.shape, weight.codes()
    dtype = torch.float16 if kind in FLOAT16_TYPES else torch.float32
    scales, offsets = (
        None if each is None else each.to(dtype).T.contiguous() for each in (codes.scales, codes.offsets)
    )
    assert scales is not None
    header = ggml.read_header(kind, weight.blocks).reshape(N, -1).T.contiguous()
    return replace(
        from_codes(codes, scales, record_origin(weight), K // max(1, len(scales))),
        offset="none" if offsets is None else "weight",
        offsets=offsets,
        header=header if kind in K_TYPES else None,
        known_in_order=True,
    )


def restore_integers(integers: Integers, origin: Origin) -> Weight:
    """Invert `read_integers`."""
    kind = origin.config.type
    if integers.header is None:
        floats = [integers.scales.T] + ([] if integers.offsets is None else [-integers.offsets.T])
        header = torch.stack(floats, -1).view(torch.uint8).flatten(1)
    else:
        header = integers.header.T
    codes = devices.plain(integers.unpack()).T.to(torch.uint8)
    blocks = ggml.encode(kind, codes, header, BLOCK_TYPES[kind].elements)
    return GGUFWeight(config=origin.config, blocks=blocks, layer=integers.layer)


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
