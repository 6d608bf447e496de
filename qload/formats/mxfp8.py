"""MXFP8 (OCP Microscaling): floats of 8 bits, one power of two for every 32 inputs.

On disk, for a layer of K inputs and N outputs, written by ModelOpt (MXFP8) and compressed-tensors
(mxfp8-quantized):

    weight        e4m3fn  (N, K)
    weight_scale  uint8   (N, K/32)  e8m0: an exponent alone

    w[n, k] = weight[n, k] * 2**(weight_scale[n, k / 32] - 127)

transformers and SGLang (quant_method mxfp8) call the exponents `weight_scale_inv`; some programs store them
as float8_e8m0fnu. An exponent of 255 is NaN. Source: compressed-tensors 0.20.0 and modelopt 0.47.0, bit-equal
to both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from qload import dtypes, spec
from qload.devices import StoredRows
from qload.layouts import fp4, swizzle
from qload.layouts.packing import byte_values
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec

GROUP = fp4.MX_GROUP
EXPONENTS = (dtypes.uint8, dtypes.float8_e8m0fnu)
SCALE_NAMES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True)
class MXFP8Config(spec.Config):
    """Config of MXFP8; `swizzled`: exponents are in the order of tensor cores (`layouts.swizzle`)."""

    name: ClassVar[str] = "mxfp8"

    swizzled: bool = field(default=False, repr=False)


@dataclass(frozen=True, eq=False, repr=False)
class MXFP8Weight(spec.Weight):
    """An MXFP8 layer, or a share of one.

    w[n, k] = weight[n, k] * 2**(weight_scale[n, k / 32] - 127). Source: compressed-tensors and modelopt,
    bit-equal to the files of both.

    Attributes
    ----------
    weight
        (N, K), float8_e4m3fn.
    weight_scale
        Exponents (e8m0), 255 for NaN: (N, K / 32), uint8 or float8_e8m0fnu; in the order of tensor cores if
        `config.swizzled`.
    """

    config: MXFP8Config
    weight: Tensor
    weight_scale: Tensor

    format: ClassVar[str] = "mxfp8"
    example: ClassVar[MXFP8Config] = MXFP8Config()

    @classmethod
    def tensors(cls, config: MXFP8Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; cuts of K fall between groups of 32 inputs."""
        scales = TensorSpec("weight_scale", EXPONENTS, f"N K/{GROUP}", Role.SCALE, stored=SCALE_NAMES)
        codes = TensorSpec("weight", (dtypes.float8_e4m3fn,), "N K", Role.WORD)
        return codes, replace(scales, **swizzle.scale_axes(GROUP)) if config.swizzled else scales

    @property
    def exponents(self) -> Tensor:
        """Exponents (N, K / 32) in plain order, uint8."""
        (N, K), stored = self.shape, self.weight_scale.view(torch.uint8)
        return swizzle.unswizzle_scales(stored, N, K // GROUP) if self.config.swizzled else stored

    def stored(self) -> StoredRows:
        """Describe the stored order for kernels."""
        return StoredRows(self.weight, self.exponents, 1, GROUP)

    def codes(self) -> spec.Codes:
        """Return the bytes, their values, and the powers of two."""
        device = self.device
        return spec.Codes(
            bits=8,
            codes=self.weight.view(torch.uint8),
            scales=fp4.e8m0(self.exponents),
            zeros=None,
            k_group=torch.arange(self.layer.K, device=device) // GROUP,
            lookup=byte_values(self.weight.dtype, device),
        )


def dialects(formats: tuple[ConfiguredFormat, ...]) -> tuple[ConfiguredFormat, ...]:
    """MXFP8 under both names of its exponents."""
    return (ConfiguredFormat(MXFP8Weight, MXFP8Config()),)


FORMATS = (MXFP8Weight,)
METHODS = ()  # read by detect.methods
