"""MXFP8: a byte an element, and a power of two for every 32 inputs.

On disk, for a layer of K inputs and N outputs, as ModelOpt (MXFP8) and compressed-tensors (mxfp8-quantized)
write it:

    weight        e4m3fn  (N, K)
    weight_scale  uint8   (N, K/32)  e8m0: an exponent alone

    w[n, k] = weight[n, k] * 2**(weight_scale[n, k / 32] - 127)

transformers and SGLang (quant_method mxfp8) call the exponents `weight_scale_inv`; some programs store them
as float8_e8m0fnu. An exponent of 255 is NaN. Source: compressed-tensors 0.20.0 and modelopt 0.47.0, bit-equal
to both.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredRows
from qload.layouts import fp4
from qload.spec import Role, TensorSpec

GROUP = 32
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
NAMES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True)
class MXFP8Config(spec.Config):
    """There is one MXFP8, so that a config has nothing to say."""

    name: ClassVar[str] = "mxfp8"


@dataclass(frozen=True, eq=False, repr=False)
class MXFP8Weight(spec.Weight):
    """An MXFP8 layer, or a share of one.

    w[n, k] = weight[n, k] * 2**(weight_scale[n, k / 32] - 127). Source: the files of compressed-tensors and
    modelopt, bit-equal to both.

    Attributes
    ----------
    weight
        (N, K), float8_e4m3fn.
    weight_scale
        Exponents (e8m0), 255 for NaN: (N, K / 32), uint8 or float8_e8m0fnu.
    """

    config: MXFP8Config
    weight: Tensor
    weight_scale: Tensor

    format: ClassVar[str] = "mxfp8"
    example: ClassVar[MXFP8Config] = MXFP8Config()

    @classmethod
    def tensors(cls, config: MXFP8Config) -> tuple[TensorSpec, ...]:
        """Thirty-two inputs share a scale, so that cuts of K fall between them."""
        return (
            TensorSpec("weight", (torch.float8_e4m3fn,), "N K", Role.WORD),
            TensorSpec("weight_scale", EXPONENTS, f"N K/{GROUP}", Role.SCALE, stored=NAMES),
        )

    @property
    def exponents(self) -> Tensor:
        """The exponents as uint8."""
        return self.weight_scale.view(torch.uint8)

    def stored(self) -> StoredRows:
        """As it lies."""
        return StoredRows(self.weight, self.exponents, 1, GROUP)

    def codes(self) -> spec.Codes:
        """The bytes, what each of them is, and the powers of two."""
        device = self.device
        return spec.Codes(
            bits=8,
            codes=self.weight.view(torch.uint8),
            scales=fp4.e8m0(self.exponents),
            zeros=None,
            k_group=torch.arange(self.layer.K, device=device) // GROUP,
            lookup=torch.arange(256, device=device).to(torch.uint8).view(self.weight.dtype).float(),
        )
