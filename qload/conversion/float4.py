"""Targets of four-bit floats: MXFP4 and NVFP4 of each program, from one another without loss.

Every format is read as e2m1 codes and scales (`Fp4`), and written from them:

    mxfp4, nvfp4            compressed-tensors
    mxfp4_mlx, nvfp4_mlx    MLX
    mxfp4_quark             Quark
    nvfp4_modelopt          ModelOpt

A second scale of NVFP4 divides (compressed-tensors), multiplies scales (ModelOpt) or products (GGUF), or is
absent (MLX). It is written in another way if all products stay equal in float32. MXFP4 becomes NVFP4 if its
exponents are within 2**17, the powers of two of e4m3fn.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qload import devices
from qload.errors import RepackError
from qload.formats import (
    CTMXFP4Weight,
    CTNVFP4Weight,
    MLXFloatConfig,
    MLXFloatWeight,
    ModelOptNVFP4Weight,
    MXFP4Config,
    NVFP4Config,
    mx,
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

QUARK_TENSORS = ("weight", "weight_scale")
E8M0_BIAS, LARGEST_POWER, POWERS = 127, 8, 17  # e4m3fn has 2**8 and 17 smaller powers of two
NEGATIVE_ZERO, MAGNITUDES = 8, 8  # code of -0, and codes without a sign
SECOND_SCALE_ULPS = (0, 1, -1)  # distances of a candidate from the quotient, in units in the last place


@dataclass(frozen=True)
class Float4Target:
    """Format of a target: type and config of its weights."""

    weight_type: type[Weight]
    config: Any

    @property
    def names(self) -> Fp4TensorNames:
        """Group size and tensor names."""
        return find_tensor_names(self.weight_type, self.config)

    def write(self, floats: Fp4) -> Weight:
        """Write codes and scales under the names of the target."""
        reader = find_reader(self.weight_type, self.config)
        assert reader is not None
        assert reader.restore is not None
        return reader.restore(floats, Origin(self.weight_type, self.config))


TARGETS: Mapping[str, Float4Target] = {
    "mxfp4": Float4Target(CTMXFP4Weight, MXFP4Config()),
    "mxfp4_mlx": Float4Target(MLXFloatWeight, MLXFloatConfig("mxfp4")),
    "mxfp4_quark": Float4Target(CTMXFP4Weight, MXFP4Config(QUARK_TENSORS)),
    "nvfp4": Float4Target(CTNVFP4Weight, NVFP4Config()),
    "nvfp4_mlx": Float4Target(MLXFloatWeight, MLXFloatConfig("nvfp4")),
    "nvfp4_modelopt": Float4Target(ModelOptNVFP4Weight, NVFP4Config()),
}


def is_float4(layer: LayerDescription) -> bool:
    """Return whether a layer is MXFP4 or NVFP4."""
    reader = find_reader(layer.format.weight_type, layer.format.config)
    return reader is not None and reader.intermediate is Fp4


def why_not(layer: LayerDescription, to: str) -> str | None:
    """Return why a layer cannot become a target by its description, or None."""
    if layer.transforms is not None:
        return f"it transforms its {layer.transforms} at run time, which {to} cannot express"
    if layer.format.activations is not None:
        return f"its inputs are quantized ({layer.format.activations}), which {to} cannot express"
    if is_float4(layer):
        return None
    return f"{layer.format.weight_type.format} is neither MXFP4 nor NVFP4, and convert does not quantize"


def convert_float4(weight: Weight, to: str) -> Weight:
    """Write a weight of MXFP4 or NVFP4 as a target; RepackError if that is not exact."""
    reader = find_reader(type(weight), weight.config)
    assert reader is not None
    floats: Fp4 = reader.read(weight)
    target, source = TARGETS[to], floats.names
    if source.ggml:
        if invalid := describe_invalid_scales(floats):
            raise RepackError(weight.format, to, invalid)
        codes = devices.plain(floats.unpack())
        codes = codes.masked_fill(codes == NEGATIVE_ZERO, 0)  # ggml has no -0
        floats = replace(floats, unpack=lambda: codes)
    if source.group_size != target.names.group_size:
        floats = _split_groups(floats, to)
    if target.names.group_size != mx.GROUP:
        floats = _move_second_scale(floats, to)
    return target.write(replace(floats, names=target.names))


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


def _move_second_scale(floats: Fp4, to: str) -> Fp4:
    """Return scales and second scale as the target has them; RepackError if products would change."""
    names, second = TARGETS[to].names, floats.second_scale
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
