"""NVFP4: four-bit floats, an FP8 scale for every 16 inputs, and a global scale for the tensor.

On disk, for a layer of K inputs and N outputs, written by compressed-tensors (nvfp4-pack-quantized):

    weight_packed        uint8   (N, K/2)    two e2m1 codes a byte, the first in the low bits
    weight_scale         e4m3fn  (N, K/16)
    weight_global_scale  fp32    () or (1,)
    input_global_scale   fp32    () or (1,)  of the activations; optional

    w[n, k] = e2m1[code] * (weight_scale[n, k / 16] / weight_global_scale)

and by ModelOpt, with the inverse as second scale:

    weight               uint8   (N, K/2)    likewise
    weight_scale         e4m3fn  (N, K/16)
    weight_scale_2       fp32    () or (1,)
    input_scale          fp32    () or (1,)  of the activations; optional

    w[n, k] = e2m1[code] * (weight_scale[n, k / 16] * weight_scale_2)

Fused parts keep one second scale each. Source: compressed-tensors 0.20.0 and modelopt 0.47.0,
bit-equal to both (to the first after one rounding).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qload import dtypes, spec
from qload.layouts import NibblePairs, fp4
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec

E4M3FN, GROUP = dtypes.float8_e4m3fn, 16
SECOND = ("weight_global_scale", "input_global_scale", "weight_scale_2", "input_scale")


@dataclass(frozen=True)
class NVFP4Config(spec.Config):
    """Config of NVFP4: empty, because there is one scheme."""

    name: ClassVar[str] = "nvfp4"

    def for_layer(self, headers: spec.LayerHeaders) -> NVFP4Config:
        """Check the shapes; ShapeError for several second scales of one tensor."""
        headers.check_single(SECOND)
        return self


@dataclass(frozen=True, eq=False, repr=False)
class _NVFP4Weight(spec.Weight):
    """Base of both dialects of NVFP4."""

    config: NVFP4Config

    example: ClassVar[NVFP4Config] = NVFP4Config()

    @abstractmethod
    def packed_and_scales(self) -> tuple[Tensor, Tensor]:
        """Bytes (N, K/2) of codes, and the product of both scales (N, K/16), float32."""

    def codes(self) -> spec.Codes:
        """Return the codes, their values, and the product of both scales."""
        packed, scales = self.packed_and_scales()
        return spec.Codes(
            bits=4,
            codes=NibblePairs(packed, high_first=False),
            scales=scales,
            zeros=None,
            k_group=torch.arange(self.layer.K, device=packed.device) // GROUP,
            lookup=fp4.values(packed.device),
        )


def both_scales(scales: Tensor, second: Tensor, parts: Sequence[int], *, divides: bool) -> Tensor:
    """Multiply `scales` by `second`, or divide if it `divides`: (N, K / 16), float32, rounded once.

    `second`: one scale per part; `parts`: the outputs of each part.
    """
    column = spec.expand_parts(second, parts)[:, None]
    return scales.float() / column if divides else scales.float() * column


def _tensors(packed: str, second: str, inputs: str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(packed, (dtypes.uint8,), "N K/2", Role.WORD),
        TensorSpec("weight_scale", (E4M3FN,), f"N K/{GROUP}", Role.SCALE),
        TensorSpec(
            second, (dtypes.float32,), "P", Role.SCALE, divides=True
        ),  # it divides, or is the inverse of a divisor
        TensorSpec(inputs, (dtypes.float32,), "P", Role.SCALE, optional=True, divides=True),
    )


@dataclass(frozen=True, eq=False, repr=False)
class CTNVFP4Weight(_NVFP4Weight):
    """An NVFP4 layer of compressed-tensors, or a share of one: the global scale divides.

    w[n, k] = e2m1[code] * (weight_scale[n, k / 16] / weight_global_scale). Source:
    compressed-tensors, bit-equal to its files after one rounding.

    Attributes
    ----------
    weight_packed
        Two e2m1 codes a byte, the first in the low bits: (N, K / 2), uint8.
    weight_scale
        (N, K / 16), float8_e4m3fn.
    weight_global_scale
        () or (1,), or one per fused part, fp32.
    input_global_scale
        Of the activations, same shape, fp32; None: not stored.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    weight_global_scale: Tensor
    input_global_scale: Tensor | None = None

    format: ClassVar[str] = "ct_nvfp4"

    @classmethod
    def tensors(cls, config: NVFP4Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; cuts of K fall between groups of 16 inputs."""
        return _tensors("weight_packed", "weight_global_scale", "input_global_scale")

    def packed_and_scales(self) -> tuple[Tensor, Tensor]:
        """Return bytes, and scales divided by the global scale in float32."""
        second, parts = self.weight_global_scale, self.layer.parts
        return self.weight_packed, both_scales(self.weight_scale, second, parts, divides=True)


@dataclass(frozen=True, eq=False, repr=False)
class ModelOptNVFP4Weight(_NVFP4Weight):
    """An NVFP4 layer of ModelOpt, or a share of one: the second scale multiplies.

    w[n, k] = e2m1[code] * (weight_scale[n, k / 16] * weight_scale_2). Source: modelopt,
    bit-equal to its files.

    Attributes
    ----------
    weight
        Two e2m1 codes a byte, the first in the low bits: (N, K / 2), uint8.
    weight_scale
        (N, K / 16), float8_e4m3fn.
    weight_scale_2
        () or (1,), or one per fused part, fp32.
    input_scale
        Of the activations, same shape, fp32; None: not stored.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor
    input_scale: Tensor | None = None

    format: ClassVar[str] = "modelopt_nvfp4"

    @classmethod
    def tensors(cls, config: NVFP4Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; cuts of K fall between groups of 16 inputs."""
        return _tensors("weight", "weight_scale_2", "input_scale")

    def packed_and_scales(self) -> tuple[Tensor, Tensor]:
        """Return bytes, and scales multiplied by the second scale in float32."""
        second, parts = self.weight_scale_2, self.layer.parts
        return self.weight, both_scales(self.weight_scale, second, parts, divides=False)


def dialects(formats: tuple[ConfiguredFormat, ...]) -> tuple[ConfiguredFormat, ...]:
    """Both dialects of NVFP4."""
    return tuple(ConfiguredFormat(weight_type, NVFP4Config()) for weight_type in FORMATS)


FORMATS = (CTNVFP4Weight, ModelOptNVFP4Weight)
METHODS = ()  # read by detect.methods
