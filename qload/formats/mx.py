"""MXFP4 (OCP Microscaling): floats of 4 bits, one power of two for every 32 inputs.

On disk, for a layer of K inputs and N outputs, written by compressed-tensors (mxfp4-pack-quantized):

    weight_packed  uint8  (N, K/2)          two e2m1 codes a byte, the first in the low bits
    weight_scale   uint8  (N, K/32)         e8m0: an exponent alone

    w[n, k] = e2m1[code] * 2**(weight_scale[n, k / 32] - 127)

ModelOpt (mxfp4) calls the codes `weight`. DeepSeek V4 calls them `weight` and the exponents `scale`, with
dtypes int8 and float8_e8m0fnu for the same bytes. gpt-oss has the E experts of a layer in two tensors, with
these suffixes, or `.blocks` and `.scales` in OpenAI's own files:

    _blocks        uint8  (E, N, K/32, 16)  the bytes of 32 inputs
    _scales        uint8  (E, N, K/32)      e8m0

An exponent of 255 is NaN by the specification; some readers decode it as 2**128.
Source: compressed-tensors 0.20.0, transformers 5.23.0 and torchao 0.18.0, bit-equal to all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from qload import dtypes, spec
from qload.devices import StoredRows
from qload.dtypes import STORED, DtypeLike
from qload.errors import ArgumentError
from qload.layouts import NibblePairs, fp4, swizzle
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec, named

GROUP = fp4.MX_GROUP
BYTES = (dtypes.uint8,)
MXFP4_CODE_DTYPES, MXFP4_EXPONENT_DTYPES = (dtypes.uint8, dtypes.int8), (dtypes.uint8, dtypes.float8_e8m0fnu)
MXFP4_TENSORS = ("weight_packed", "weight_scale")


@dataclass(frozen=True)
class MXFP4Config(spec.Config):
    """Config of MXFP4: names and dtypes on disk.

    Attributes
    ----------
    stored
        Names of codes and of exponents on disk.
    codes, exponents
        Their stored dtypes; the bytes have one meaning in all of them.
    swizzled
        Whether exponents are in the order of tensor cores (`layouts.swizzle`).
    """

    name: ClassVar[str] = "mxfp4"

    stored: tuple[str, str] = field(default=MXFP4_TENSORS, repr=False)
    codes: DtypeLike = field(default=dtypes.uint8, repr=False)
    exponents: DtypeLike = field(default=dtypes.uint8, repr=False)
    swizzled: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("codes", "exponents"):
            object.__setattr__(self, name, STORED[getattr(self, name)])

    def for_layer(self, headers: spec.LayerHeaders) -> MXFP4Config:
        """Return the config with the dtypes of the stored tensors."""
        codes, exponents = (headers.dtypes.get(name, dtypes.uint8) for name in MXFP4_TENSORS)
        return replace(self, codes=codes, exponents=exponents)


def _codes(packed: Tensor, exponents: Tensor) -> spec.Codes:
    """Typed codes of bytes (R, C/2) and exponents (R, C/32)."""
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
    """An MXFP4 layer of compressed-tensors, or a share of one.

    w[n, k] = e2m1[code] * 2**(weight_scale[n, k / 32] - 127). Source: compressed-tensors,
    bit-equal to its files.

    Attributes
    ----------
    weight_packed
        Two e2m1 codes a byte, the first in the low bits: (N, K / 2), uint8 or int8.
    weight_scale
        Exponents (e8m0), 255 for NaN: (N, K / 32), uint8 or float8_e8m0fnu; in the order of tensor cores if
        `config.swizzled`.
    """

    config: MXFP4Config
    weight_packed: Tensor
    weight_scale: Tensor

    format: ClassVar[str] = "ct_mxfp4"
    example: ClassVar[MXFP4Config] = MXFP4Config()

    @classmethod
    def tensors(cls, config: MXFP4Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; cuts of K fall between groups of 32 inputs."""
        packed, scale = config.stored
        scales = TensorSpec("weight_scale", MXFP4_EXPONENT_DTYPES, f"N K/{GROUP}", Role.SCALE, stored=scale)
        codes = TensorSpec("weight_packed", MXFP4_CODE_DTYPES, "N K/2", Role.WORD, stored=packed)
        return codes, replace(scales, **swizzle.scale_axes(GROUP)) if config.swizzled else scales

    @property
    def exponents(self) -> Tensor:
        """Exponents (N, K / 32) in plain order, uint8."""
        (N, K), stored = self.shape, self.weight_scale.view(torch.uint8)
        return swizzle.unswizzle_scales(stored, N, K // GROUP) if self.config.swizzled else stored

    def stored(self) -> StoredRows:
        """Describe the stored order for kernels."""
        packed = self.weight_packed.view(torch.uint8)
        return StoredRows(packed, self.exponents, 1, GROUP, four_bits="e2m1")

    def codes(self) -> spec.Codes:
        """Return the codes, their values, and the powers of two."""
        return _codes(self.weight_packed.view(torch.uint8), self.exponents)


@dataclass(frozen=True, eq=False, repr=False)
class MXFP4ExpertsWeight(spec.Weight):
    """All experts of a gpt-oss layer, or a share of each: (E, N, K).

    Source: gpt-oss in transformers, bit-equal to its files.

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
        """Declare the tensors; a rank has a share of every expert, and cuts of K fall between blocks."""
        return (
            TensorSpec("blocks", BYTES, f"E N K/{GROUP} 16", Role.WORD, stored=("_blocks", "blocks")),
            TensorSpec("scales", BYTES, f"E N K/{GROUP}", Role.SCALE, stored=("_scales", "scales")),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, N, K): experts, out_features, in_features of this share."""
        return (self.scales.shape[0], self.layer.N, self.layer.K)

    def expert(self, index: int) -> CTMXFP4Weight:
        """Return the expert `index` as a layer, over the same memory, for a linear call.

        ArgumentError for an index out of range.
        """
        if not 0 <= index < self.shape[0]:
            raise ArgumentError("index", f"an expert, 0 to {self.shape[0] - 1}", str(index))
        name = named(self.layer.name, f"expert {index}")
        packed, exponents = self.blocks[index].flatten(1), self.scales[index]
        return CTMXFP4Weight(self.config, packed, exponents, layer=replace(self.layer, name=name))

    def codes(self) -> spec.Codes:
        """Return the codes and powers of two of all experts, concatenated: (E * N, K)."""
        return _codes(self.blocks.flatten(2).flatten(0, 1), self.scales.flatten(0, 1))

    def dequantize(self, dtype: DtypeLike = dtypes.float32, out: Tensor | None = None) -> Tensor:
        """Dequantize all experts to (E, N, K)."""
        if out is not None:
            spec.check_out(out, self.shape, self.device)
        values = super().dequantize(dtype if out is None else out.dtype).reshape(self.shape)
        return spec.rounded(values, dtype, out)


def dialects(formats: tuple[ConfiguredFormat, ...]) -> tuple[ConfiguredFormat, ...]:
    """MXFP4 under all names of its tensors, of a layer or of all experts."""
    scales = ("weight_scale", "weight_scale_inv", "scale")
    names = (MXFP4_TENSORS, *(("weight", scale) for scale in scales))
    return (
        *(ConfiguredFormat(CTMXFP4Weight, MXFP4Config(stored)) for stored in names),
        ConfiguredFormat(MXFP4ExpertsWeight, MXFP4Config()),
    )


FORMATS = (CTMXFP4Weight, MXFP4ExpertsWeight)
METHODS = ()  # read by detect.methods
