"""Targets of four-bit floats: MXFP4 and NVFP4 of each program, from one another without loss.

Every format is read as e2m1 codes and scales (`Fp4`), and written from them:

    mxfp4, nvfp4            compressed-tensors
    mxfp4_mlx, nvfp4_mlx    MLX
    mxfp4_quark             Quark
    mxfp4_deepseek          DeepSeek V4, as published
    mxfp4_gpt_oss           gpt-oss, with all experts of a layer in one tensor
    nvfp4_modelopt          ModelOpt
    gguf                    GGUF, as MXFP4 or NVFP4, by the groups of the source

A second scale of NVFP4 divides (compressed-tensors), multiplies scales (ModelOpt) or products (GGUF), or is
absent (MLX). It is written in another way if all products stay equal in float32. MXFP4 becomes NVFP4 if its
exponents are within 2**17, the powers of two of e4m3fn.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qload import devices, dtypes
from qload.errors import RepackError
from qload.formats import (
    CTMXFP4Weight,
    CTNVFP4Weight,
    GGUFConfig,
    GGUFWeight,
    MLXFloatConfig,
    MLXFloatWeight,
    ModelOptNVFP4Weight,
    MXFP4Config,
    MXFP4ExpertsWeight,
    NVFP4Config,
    mx,
    nvfp4,
)
from qload.kernel_formats.fp4_marlin import (
    Fp4,
    Fp4TensorNames,
    describe_invalid_scales,
    describe_scales,
    find_tensor_names,
)
from qload.kernel_formats.repack import find_reader
from qload.layouts import fp4
from qload.loader import LayerDescription
from qload.spec import Weight
from qload.spec.integers import Origin
from qload.storage import BLOCK_TYPES

QUARK_TENSORS, DEEPSEEK_TENSORS = ("weight", "weight_scale"), ("weight", "scale")
GPT_OSS, DEEPSEEK, EXPERT_DTYPE = "mxfp4_gpt_oss", "mxfp4_deepseek", "expert_dtype"
DEEPSEEK_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
E8M0_BIAS, LARGEST_POWER, POWERS = 127, 8, 17  # e4m3fn has 2**8 and 17 smaller powers of two
NEGATIVE_ZERO, MAGNITUDES = 8, 8  # code of -0, and codes without a sign
SECOND_SCALE_ULPS = (0, 1, -1)  # distances of a candidate from the quotient, in units in the last place


@dataclass(frozen=True)
class Float4Target:
    """Format of a target: type and config of its weights; `stacked` is the type of all experts of a layer."""

    weight_type: type[Weight]
    config: Any
    stacked: type[Weight] | None = None

    @property
    def names(self) -> Fp4TensorNames:
        """Group size and tensor names."""
        return find_tensor_names(self.weight_type, self.config)

    def write(self, floats: Fp4) -> Weight:
        """Write codes and scales under the names of the target."""
        reader = find_reader(self.weight_type, self.config)
        assert reader is not None
        assert reader.restore is not None
        return reader.restore(floats, Origin(self.weight_type, self.config, stores_zeros=self.names.ggml))


TARGETS: Mapping[str, Float4Target] = {
    "mxfp4": Float4Target(CTMXFP4Weight, MXFP4Config()),
    "mxfp4_mlx": Float4Target(MLXFloatWeight, MLXFloatConfig("mxfp4")),
    "mxfp4_quark": Float4Target(CTMXFP4Weight, MXFP4Config(QUARK_TENSORS)),
    DEEPSEEK: Float4Target(CTMXFP4Weight, MXFP4Config(DEEPSEEK_TENSORS, dtypes.int8, dtypes.float8_e8m0fnu)),
    GPT_OSS: Float4Target(CTMXFP4Weight, MXFP4Config(), MXFP4ExpertsWeight),
    "nvfp4": Float4Target(CTNVFP4Weight, NVFP4Config()),
    "nvfp4_mlx": Float4Target(MLXFloatWeight, MLXFloatConfig("nvfp4")),
    "nvfp4_modelopt": Float4Target(ModelOptNVFP4Weight, NVFP4Config()),
}
GGUF = "gguf"
GGUF_TARGETS = {
    size: Float4Target(GGUFWeight, GGUFConfig(kind))
    for size, kind in ((mx.GROUP, "MXFP4"), (nvfp4.GROUP, "NVFP4"))
}


def is_float4(layer: LayerDescription) -> bool:
    """Return whether a layer is MXFP4 or NVFP4."""
    reader = find_reader(layer.format.weight_type, layer.format.config)
    return reader is not None and reader.intermediate is Fp4


def describe_inexpressible(layer: LayerDescription, to: str) -> str | None:
    """Return why a layer's inputs cannot be described by a target, or None."""
    if layer.transforms is not None:
        return f"it transforms its {layer.transforms} at run time, which {to} cannot express"
    if layer.format.activations is not None:
        return f"its inputs are quantized ({layer.format.activations}), which {to} cannot express"
    return None


def why_not(layer: LayerDescription, to: str) -> str | None:
    """Return why a layer cannot become a target by its description, or None."""
    if reason := describe_inexpressible(layer, to):
        return reason
    if is_float4(layer):
        return None
    return f"{layer.format.weight_type.format} is neither MXFP4 nor NVFP4, and convert does not quantize"


def convert_float4(weight: Weight, to: str, *, rounding: bool = False) -> Weight:
    """Write a weight of MXFP4 or NVFP4 as a target; RepackError if that is not exact.

    `rounding` permits -0 to become 0, the only zero of ggml.
    """
    reader = find_reader(type(weight), weight.config)
    assert reader is not None
    floats: Fp4 = reader.read(weight)
    source = floats.names
    target = GGUF_TARGETS[source.group_size] if to == GGUF else TARGETS[to]
    elements = BLOCK_TYPES[target.config.type].elements if target.names.ggml else 1
    if floats.layer.K % elements:
        reason = f"a block of {target.config.type} has {elements} inputs, got {floats.layer.K} inputs"
        raise RepackError(floats.source, to, reason)
    if source.ggml or target.names.ggml:
        floats = _replace_negative_zeros(floats, target.names, to, rounding)
    if source.group_size != target.names.group_size:
        floats = _split_groups(floats, to)
    if target.names.group_size != mx.GROUP:
        floats = _move_second_scale(floats, target.names, to)
    if target.names.ggml and floats.second_scale is not None:
        floats = replace(floats, second_scale=floats.second_scale.reshape(1))
    return target.write(replace(floats, names=target.names))


def _replace_negative_zeros(floats: Fp4, names: Fp4TensorNames, to: str, rounding: bool) -> Fp4:
    """Replace codes of -0 in ggml, which reads them as 0, by codes of 0 in any other format.

    A target of ggml keeps the codes, as llama.cpp's converter does; RepackError for a -0 of another format
    without `rounding`, and for a scale with another meaning in ggml, such as an exponent of 255.
    """
    if invalid := describe_invalid_scales(floats):
        raise RepackError(floats.source, to, invalid)
    codes = devices.plain(floats.unpack())
    negative = codes == NEGATIVE_ZERO
    if names.ggml:
        if not (floats.names.ggml or rounding) and bool(negative.any()):
            k, n = negative.nonzero()[0].tolist()
            reason = f"the value of output {n} and input {k} is -0, which ggml reads as 0"
            raise RepackError(floats.source, to, f"{reason}; rounding (--round) permits it")
        return floats
    codes = codes.masked_fill(negative, 0)
    return replace(floats, unpack=lambda: codes)


def _split_groups(floats: Fp4, to: str) -> Fp4:
    """Convert exponents of 32 inputs to scales of 16; RepackError if e4m3fn does not have them."""
    if floats.names.group_size != mx.GROUP:
        reason = "its scales are of 16 inputs and no powers of two, which MXFP4 cannot express"
        raise RepackError(floats.source, to, reason)
    exponents = floats.scales.view(torch.uint8).int()
    largest = exponents.amax() if exponents.numel() else exponents.new_tensor(E8M0_BIAS)
    powers = exponents - largest + LARGEST_POWER
    name, far = floats.full_name(floats.names.scales), f"more than 2**{POWERS} times smaller than another"
    invalid = describe_invalid_scales(floats) or describe_scales(
        name, floats.scales, powers < LARGEST_POWER - POWERS, far
    )
    if invalid:
        raise RepackError(floats.source, to, invalid)
    scales = torch.exp2(powers.float()).repeat_interleave(2, 1).to(torch.float8_e4m3fn)
    second = fp4.e8m0(largest.to(torch.uint8)).reshape(1) * 2.0**-LARGEST_POWER
    names = find_tensor_names(ModelOptNVFP4Weight, NVFP4Config())
    return replace(floats, names=names, scales=scales, second_scale=second)


def _move_second_scale(floats: Fp4, names: Fp4TensorNames, to: str) -> Fp4:
    """Return scales and second scale as the target has them; RepackError if products would change."""
    second = floats.second_scale
    assert second is not None
    if not names.second_scale:
        product = floats.scales.float() / second if floats.names.divides else floats.scales.float() * second
        scales = product.to(torch.float8_e4m3fn)
        inexact = ((scales.float() != product) | (product < 0)).nonzero()  # MLX has no negative ones
        if inexact.numel():
            n, group = inexact[0].tolist()
            reason = (
                f"the scale of output {n} and group {group} times the second scale is "
                f"{float(product[n, group]):.9g}, and no float8_e4m3fn"
            )
            raise RepackError(floats.source, to, reason)
        return replace(floats, scales=scales, second_scale=None)
    if (names.divides, names.ggml) == (floats.names.divides, floats.names.ggml):
        return floats
    present = torch.unique(floats.scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    wanted, first = _products(floats.names, present, second), None
    for candidate in _candidates(second, names.divides != floats.names.divides):
        differ = (_products(names, present, candidate) != wanted).any(1)
        if not bool(differ.any()):
            return replace(floats, second_scale=candidate)
        first = present[differ][0] if first is None else first
    assert first is not None
    n, group = (floats.scales.view(torch.uint8) == first.view(torch.uint8)).nonzero()[0].tolist()
    reason = (
        f"no second scale of {to} gives the products of output {n} and group {group}: "
        f"codes times {float(first):g} by a second scale of {float(second.flatten()[0]):.9g}"
    )
    raise RepackError(floats.source, to, reason)


def _candidates(second: Tensor, inverted: bool) -> Iterator[Tensor]:
    """Yield second scales that may give the same products: one value for the tensor, fp32 (1,)."""
    nearest = (second.reciprocal() if inverted else second).reshape(1)
    for ulps in SECOND_SCALE_ULPS:
        yield (nearest.view(torch.int32) + ulps).view(torch.float32)


def _products(names: Fp4TensorNames, scales: Tensor, second: Tensor) -> Tensor:
    """Products (S, 8) of the codes without a sign and some scales, rounded as in the format of `names`."""
    values, scales = fp4.values(scales.device)[:MAGNITUDES], scales.float()[:, None]
    if names.ggml:
        return values * scales * second
    return values * (scales / second if names.divides else scales * second)


def weights_scheme(group_size: int) -> dict[str, Any]:
    """Return the entry `weights` of a config group of compressed-tensors."""
    is_mx = group_size == mx.GROUP
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": "group" if is_mx else "tensor_group",
        "group_size": group_size,
        "symmetric": True,
        "scale_dtype": "torch.uint8" if is_mx else "torch.float8_e4m3fn",
        "dynamic": False,
    }
