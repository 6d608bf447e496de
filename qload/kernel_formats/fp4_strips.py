"""NVFP4 and MXFP4 in strips: e2m1 codes as 4-bit codes, and scales of one byte.

    qweight        int32         (N/64, K*8)         e2m1 codes in `layouts.strips`
    scales         uint8         (K/128, N*128/g)    s0e5m3 in the order `layouts.strips.group_scales`;
                                                     g = 16 (NVFP4) or 32 (MXFP4)
    column_scales  fp32          (N,)                one per output
    second_scale   fp32          () or (P,)          the checkpoint's own; NVFP4 only
    input_scale    fp32          () or (P,)          scale of the activations, as stored; optional

    w[n, k] = e2m1[code] * (s0e5m3[byte] * 2**-15) * column_scales[n]

    NVFP4:  s0e5m3[byte] = 2**7 * weight_scale[n, k / 16]
            column_scales[n] = 2**8 times or by second_scale
    MXFP4:  s0e5m3[byte] = 2**(15 + exponent[n, k / 32] - largest exponent of output n)
            column_scales[n] = 2**(largest exponent - 127)

Kernels multiply each code by its scale. The product has six significant bits and is exact in float16 and
bfloat16; so activations of either dtype need no conversion. `column_scales` multiply sums in float32. They
differ between fused parts. e2m1 has no NaN and no infinity.

The exponents of an output must be within 2**24, the range in which float16 is exact. An exponent of 0,
2**-127, is 0 in the kernel if another exponent of the output is more than 2**24 times larger. K is padded to
128 and N to 64, with codes and scales of 0.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qload import devices, dtypes, spec
from qload.errors import RepackError
from qload.formats import mx, nvfp4
from qload.kernel_formats.fp4_marlin import (
    FP4_BITS,
    SCALE_SHIFT,
    Fp4,
    Fp4MarlinConfig,
    as_fp4_codes,
    describe_invalid_scales,
    describe_scales,
)
from qload.layouts import fp4, strips
from qload.spec import Role, TensorSpec
from qload.spec.integers import pad_matrix

SCALE_BIAS = 15  # log2 of the factor that column scales have for one-byte scales
MANTISSA = 3  # mantissa bits of s0e5m3


@dataclass(frozen=True)
class ByteExponents:
    """Exponents (e8m0) as s0e5m3 relative to the largest of each output, which is a scale of the column.

    Attributes
    ----------
    largest_field
        Exponent field of the largest.
    span
        Largest difference of two exponents of an output; an exponent of 0 further away is a scale of 0.
    """

    largest_field: int
    span: int

    @property
    def far(self) -> str:
        """Property of exponents further away, for messages."""
        return f"more than 2**{self.span} times smaller than another of the output, too small for float16"

    def encode(self, exponents: Tensor) -> tuple[Tensor, Tensor]:
        """Encode exponents (N, G): bytes (N, G) and column scales (N,)."""
        stored, largest = exponents.view(torch.uint8).int(), self._find_largest(exponents)
        fields = stored - largest[:, None] + self.largest_field
        fields = fields.masked_fill(fields < self.largest_field - self.span, 0)
        return (fields << MANTISSA).to(torch.uint8), fp4.e8m0(largest.to(torch.uint8))

    def decode(self, stored: Tensor, column_scales: Tensor) -> Tensor:
        """Invert `encode`: exponents (N, G), uint8."""
        fields, largest = (stored >> MANTISSA).int(), column_scales.view(torch.int32) >> fp4.MANTISSA
        exponents = fields + largest[:, None] - self.largest_field
        return exponents.masked_fill(fields == 0, 0).to(torch.uint8)

    def find_far(self, exponents: Tensor) -> Tensor:
        """Select the exponents (N, G) that cannot be encoded."""
        stored = exponents.view(torch.uint8).int()
        return (self._find_largest(exponents)[:, None] - stored > self.span) & (stored > 0)

    @staticmethod
    def _find_largest(exponents: Tensor) -> Tensor:
        """Return the largest exponent (N,) of each output, int32."""
        stored = exponents.view(torch.uint8).int()
        return stored.amax(1) if stored.shape[1] else stored.new_zeros(stored.shape[0])


EXPONENTS = ByteExponents(
    largest_field=30, span=24
)  # products of 2**15 with 6, and the smallest, fit float16


@dataclass(frozen=True)
class Fp4StripsConfig(Fp4MarlinConfig):
    """Config of four-bit floats in strips; ArgumentError for other groups.

    The attributes are those of `Fp4MarlinConfig`.
    """

    name: ClassVar[str] = "fp4_strips"


@dataclass(frozen=True, eq=False, repr=False)
class Fp4StripsWeight(spec.Weight):
    """An NVFP4 or MXFP4 weight in strips of 64 columns, qload's order for its CUDA kernels.

    K is padded to a multiple of 128 and N to one of 64.

    Attributes
    ----------
    qweight
        e2m1 codes of `qload.layouts.strips`: (N / 64, K * 8), int32.
    scales
        Bytes (s0e5m3) of `qload.layouts.strips.group_scales`: (K / 128, N * 128 / group_size), uint8.
    column_scales
        One per output: (N,), float32.
    second_scale
        The checkpoint's own, used by `dequantize`: () or (1,), or one per fused part, fp32; None: MXFP4.
    input_scale
        Scale of the activations, as stored in the checkpoint; None: not stored.
    """

    config: Fp4StripsConfig
    qweight: Tensor
    scales: Tensor
    column_scales: Tensor
    second_scale: Tensor | None = None
    input_scale: Tensor | None = None

    format: ClassVar[str] = "fp4_strips"
    example: ClassVar[Fp4StripsConfig] = Fp4StripsConfig(nvfp4.GROUP)
    further: ClassVar[tuple[Fp4StripsConfig, ...]] = (Fp4StripsConfig(mx.GROUP),)

    @classmethod
    def tensors(cls, config: Fp4StripsConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors for padded K and N."""
        fp32, rows, columns = (dtypes.float32,), strips.TILE_K, strips.TILE_N
        per_column = rows // config.group_size
        specs = (
            TensorSpec("qweight", (dtypes.int32,), f"N/{columns} K@{rows}*{2 * FP4_BITS}", Role.WORD),
            TensorSpec("scales", (dtypes.uint8,), f"K/{rows} N@{columns}*{per_column}", Role.WORD),
            TensorSpec("column_scales", fp32, f"N@{columns}", Role.SCALE),
        )
        if config.group_size == mx.GROUP:
            return specs
        return (
            *specs,
            TensorSpec("second_scale", fp32, "P", Role.SCALE, divides=True),  # a divisor or its inverse
            TensorSpec("input_scale", fp32, "P", Role.SCALE, optional=True, divides=True),
        )

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(N, K) with the padding."""
        return self.qweight.shape[0] * strips.TILE_N, self.qweight.shape[1] // (2 * FP4_BITS)

    def byte_scales(self) -> Tensor:
        """Bytes (N, K / group_size) in plain order, without padding."""
        N, K = self.shape
        order = strips.group_scales(self.config.group_size)
        return order.undo(self.scales)[: self.config.groups(K), :N].T

    def group_scales(self) -> Tensor:
        """Stored scales of NVFP4 (N, K / 16), float32."""
        return fp4.from_s0e5m3(self.byte_scales()) * 2.0**-SCALE_SHIFT

    def plain_scales(self) -> Tensor:
        """Stored exponents of MXFP4 (N, K / 32), uint8."""
        return EXPONENTS.decode(self.byte_scales(), self.column_scales[: self.layer.N])

    def codes(self) -> spec.Codes:
        """Return the codes, their values, and the product of both scales, without padding."""
        second = None
        if self.config.group_size == mx.GROUP:
            scales = fp4.e8m0(self.plain_scales())
        elif self.second_scale is None:  # of a call, which has what its kernel reads
            columns = self.column_scales[: self.layer.N, None] * 2.0**-SCALE_BIAS
            scales = fp4.from_s0e5m3(self.byte_scales()) * columns
        else:
            scales, second = self.group_scales(), self.second_scale
        return as_fp4_codes(self, strips.rows(FP4_BITS), scales, second)


def from_fp4(floats: Fp4, *, whole: Fp4 | None = None) -> Fp4StripsWeight:
    """Convert exactly, with padding, or raise RepackError; `whole`: the layer, if this is a share of it."""
    reason = find_unsupported(whole or floats)
    if reason:
        raise RepackError(floats.source, "strips", reason)
    (N, K), group_size = (floats.layer.N, floats.layer.K), floats.names.group_size
    Np, Kp = (-(-N // strips.TILE_N) * strips.TILE_N, -(-K // strips.TILE_K) * strips.TILE_K)
    if floats.second_scale is None:
        stored, columns = EXPONENTS.encode(floats.scales)
    else:
        stored = fp4.s0e5m3((floats.scales.float() * 2.0**SCALE_SHIFT).half())
        columns = spec.expand_parts(_scales_of_parts(floats, floats.second_scale), floats.layer.parts)
    codes = floats.unpack()
    if (Np, Kp) != (N, K):
        codes = pad_matrix(devices.plain(codes), Kp, Np)
    return Fp4StripsWeight(
        config=Fp4StripsConfig(group_size, floats.names.divides, ggml=floats.names.ggml),
        qweight=strips.rows(FP4_BITS).pack(codes),
        scales=strips.group_scales(group_size).apply(pad_matrix(stored.T, Kp // group_size, Np)),
        column_scales=torch.nn.functional.pad(columns, (0, Np - N)),
        second_scale=floats.second_scale,
        input_scale=floats.input_scale,
        layer=floats.layer,
    )


def find_unsupported(floats: Fp4) -> str | None:
    """Return the reason if strips cannot represent a weight, else None; reads scales, and no codes."""
    reason = describe_invalid_scales(floats)
    if reason is not None:
        return reason
    if floats.second_scale is None:
        far, name = EXPONENTS.find_far(floats.scales), floats.full_name(floats.names.scales)
        return describe_scales(name, floats.scales, far, EXPONENTS.far)
    second, columns = floats.second_scale.flatten(), _scales_of_parts(floats, floats.second_scale)
    limits = torch.finfo(torch.float32)
    valid = (columns == 0) | ((columns.abs() >= limits.smallest_normal) & columns.isfinite())
    if bool(valid.all()):
        return None
    name, factor = floats.full_name(floats.names.second_scale), 2 ** (SCALE_BIAS - SCALE_SHIFT)
    term = f"{factor} / {name}" if floats.names.divides else f"{factor} * {name}"
    return f"{term} of {float(second[~valid][0]):g} overflows or loses bits as float32"


def _scales_of_parts(floats: Fp4, second_scale: Tensor) -> Tensor:
    """Return the column scale of each part."""
    second = second_scale.flatten()
    return (second.reciprocal() if floats.names.divides else second) * 2.0 ** (SCALE_BIAS - SCALE_SHIFT)
