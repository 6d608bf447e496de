"""MXFP4 and MXFP8 (OCP Microscaling): floats of 4 or 8 bits, one power of two for every 32 inputs."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredRows
from qload.errors import ArgumentError
from qload.layouts import NibblePairs, fp4
from qload.spec import Role, TensorSpec, named

GROUP = 32
BYTES = (torch.uint8,)
MXFP4_CODE_DTYPES, MXFP4_EXPONENT_DTYPES = (torch.uint8, torch.int8), (torch.uint8, torch.float8_e8m0fnu)
MXFP4_TENSORS = ("weight_packed", "weight_scale")


@dataclass(frozen=True)
class MXFP4Config(spec.Config):
    """Config of MXFP4: names and dtypes on disk.

    Attributes
    ----------
    stored
        The names of codes and of exponents on disk.
    codes, exponents
        Their dtypes, found when a layer is loaded or made: the bytes mean the same in each.
    """

    name: ClassVar[str] = "mxfp4"

    stored: tuple[str, str] = field(default=MXFP4_TENSORS, repr=False)
    codes: torch.dtype = field(default=torch.uint8, repr=False)
    exponents: torch.dtype = field(default=torch.uint8, repr=False)

    def for_layer(self, headers: spec.LayerHeaders) -> "MXFP4Config":
        """The config with the dtypes of the stored tensors."""
        codes, exponents = (headers.dtypes.get(name, torch.uint8) for name in MXFP4_TENSORS)
        return replace(self, codes=codes, exponents=exponents)


def _codes(packed: Tensor, exponents: Tensor) -> spec.Codes:
    """Of bytes (R, C/2) and exponents (R, C/32)."""
    return spec.Codes(
        bits=4,
        codes=NibblePairs(packed, high_first=False),
        scales=fp4.e8m0(exponents),
        zeros=None,
        k_group=torch.arange(2 * packed.shape[1], device=packed.device) // GROUP,
        lookup=fp4.values(packed.device),
    )


@dataclass(frozen=True, eq=False, repr=False)
class CTMXFP4Weight(spec.Weight):
    """A layer as compressed-tensors writes MXFP4, or a share of one.

    w[n, k] = e2m1[code] * 2**(weight_scale[n, k / 32] - 127). Source: the files of compressed-tensors, to
    which it is bit-equal.

    Attributes
    ----------
    weight_packed
        Two e2m1 codes a byte, the first in the low bits: (N, K / 2), uint8 or int8.
    weight_scale
        Exponents (e8m0), 255 for NaN: (N, K / 32), uint8 or float8_e8m0fnu.
    """

    config: MXFP4Config
    weight_packed: Tensor
    weight_scale: Tensor

    format: ClassVar[str] = "ct_mxfp4"
    example: ClassVar[MXFP4Config] = MXFP4Config()

    @classmethod
    def tensors(cls, config: MXFP4Config) -> tuple[TensorSpec, ...]:
        """Thirty-two inputs share a scale, so that cuts of K fall between them."""
        packed, scale = config.stored
        return (
            TensorSpec("weight_packed", MXFP4_CODE_DTYPES, "N K/2", Role.WORD, stored=packed),
            TensorSpec("weight_scale", MXFP4_EXPONENT_DTYPES, f"N K/{GROUP}", Role.SCALE, stored=scale),
        )

    @property
    def exponents(self) -> Tensor:
        """The exponents as uint8."""
        return self.weight_scale.view(torch.uint8)

    def stored(self) -> StoredRows:
        """As it lies."""
        packed = self.weight_packed.view(torch.uint8)
        return StoredRows(packed, self.exponents, 1, GROUP, four_bits="e2m1")

    def codes(self) -> spec.Codes:
        """The bits of each float, what they mean, and the powers of two."""
        return _codes(self.weight_packed.view(torch.uint8), self.exponents)


@dataclass(frozen=True, eq=False, repr=False)
class MXFP4ExpertsWeight(spec.Weight):
    """All experts of a gpt-oss layer, or a share of each: (E, N, K).

    Source: the files of gpt-oss as transformers reads them, to which it is bit-equal.

    Attributes
    ----------
    blocks
        The bytes of 32 inputs, two e2m1 codes each, the first in the low bits: (E, N, K / 32, 16), uint8.
    scales
        Exponents (e8m0), 255 for NaN: (E, N, K / 32), uint8.
    """

    config: MXFP4Config
    blocks: Tensor
    scales: Tensor

    format: ClassVar[str] = "mxfp4_experts"
    example: ClassVar[MXFP4Config] = MXFP4Config()

    @classmethod
    def tensors(cls, config: MXFP4Config) -> tuple[TensorSpec, ...]:
        """Every rank holds a share of every expert; cuts of K fall between blocks."""
        return (
            TensorSpec("blocks", BYTES, f"E N K/{GROUP} 16", Role.WORD, stored="_blocks"),
            TensorSpec("scales", BYTES, f"E N K/{GROUP}", Role.SCALE, stored="_scales"),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, N, K): experts, out_features, in_features of this share."""
        return (self.scales.shape[0], self.layer.N, self.layer.K)

    def expert(self, index: int) -> CTMXFP4Weight:
        """The expert `index` as a layer of its own, over the same memory: it can multiply, a stack cannot.

        ArgumentError where there is no such expert.
        """
        if not 0 <= index < self.shape[0]:
            raise ArgumentError("index", f"an expert, 0 to {self.shape[0] - 1}", str(index))
        name = named(self.layer.name, f"expert {index}")
        packed, exponents = self.blocks[index].flatten(1), self.scales[index]
        return CTMXFP4Weight(self.config, packed, exponents, layer=replace(self.layer, name=name))

    def codes(self) -> spec.Codes:
        """The codes and powers of two of all experts, one under the other: (E * N, K)."""
        return _codes(self.blocks.flatten(2).flatten(0, 1), self.scales.flatten(0, 1))

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """(E, N, K): what the experts mean."""
        if out is not None:
            spec.check_out(out, self.shape, self.device)
        made = super().dequantize(dtype if out is None else out.dtype).reshape(self.shape)
        return spec.rounded(made, dtype, out)


MXFP8_EXPONENT_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
MXFP8_SCALE_NAMES = ("weight_scale", "weight_scale_inv")


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
            TensorSpec(
                "weight_scale", MXFP8_EXPONENT_DTYPES, f"N K/{GROUP}", Role.SCALE, stored=MXFP8_SCALE_NAMES
            ),
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
