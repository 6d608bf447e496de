"""MXFP8 in strips: e4m3fn bytes as 8-bit codes, and scales of one byte per 32 inputs.

    qweight        int32  (N/64, K*16)   e4m3fn bytes in `layouts.strips`, as 8-bit codes
    scales         uint8  (K/128, N*4)   s0e5m3 in the order `layouts.strips.group_scales`
    column_scales  fp32   (N,)           one power of two per output

    w[n, k] = e4m3fn(byte) * (s0e5m3[byte] * 2**-7) * column_scales[n]

    s0e5m3[byte] = 2**(7 + exponent[n, k / 32] - largest exponent of output n)
    column_scales[n] = 2**(largest exponent - 127)

Kernels multiply each code by its scale. The product has four significant bits and is exact in float16 and
bfloat16; so activations of either dtype need no conversion. `column_scales` multiply sums in float32. A NaN
code is NaN in the product too.

The exponents of an output must be within 2**21, the range in which float16 is exact. An exponent of 0,
2**-127, is 0 in the kernel if another exponent of the output is more than 2**21 times larger. K is padded to
128 and N to 64, with codes and scales of 0.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qload import dtypes, spec
from qload.dtypes import STORED, TORCH, DtypeLike
from qload.errors import RepackError
from qload.formats import MXFP8Weight, mxfp8
from qload.kernel_formats.fp4_marlin import E8M0_NAN, describe_scales
from qload.kernel_formats.fp4_strips import ByteExponents
from qload.kernel_formats.strips import pack_bytes
from qload.layouts import ClippedCodes, fp4, strips, swizzle
from qload.layouts.packing import byte_values
from qload.spec import Role, TensorSpec, named
from qload.spec.integers import Origin, pad_matrix, record_origin

BITS = 8
EXPONENTS = ByteExponents(largest_field=22, span=21)  # products with 448 and 2**-9 fit float16


@dataclass(frozen=True)
class Mxfp8StripsConfig(spec.Config):
    """Config of an MXFP8 weight in strips.

    Attributes
    ----------
    exponents
        Dtype of the checkpoint's exponents: uint8 or float8_e8m0fnu.
    """

    name: ClassVar[str] = "mxfp8_strips"

    exponents: DtypeLike = dtypes.uint8

    def __post_init__(self) -> None:
        object.__setattr__(self, "exponents", STORED[self.exponents])


@dataclass(frozen=True, eq=False, repr=False)
class Mxfp8StripsWeight(spec.Weight):
    """An MXFP8 weight in strips of 64 columns, qload's order for its CUDA kernels.

    K is padded to a multiple of 128 and N to one of 64.

    Attributes
    ----------
    qweight
        e4m3fn bytes, as 8-bit codes of `qload.layouts.strips`: (N / 64, K * 16), int32.
    scales
        Bytes (s0e5m3) of `qload.layouts.strips.group_scales`: (K / 128, N * 4), uint8.
    column_scales
        One power of two per output: (N,), float32.
    """

    config: Mxfp8StripsConfig
    qweight: Tensor
    scales: Tensor
    column_scales: Tensor

    format: ClassVar[str] = "mxfp8_strips"
    example: ClassVar[Mxfp8StripsConfig] = Mxfp8StripsConfig()

    @classmethod
    def tensors(cls, config: Mxfp8StripsConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors for padded K and N."""
        rows, columns = strips.TILE_K, strips.TILE_N
        per_column = rows // mxfp8.GROUP
        return (
            TensorSpec("qweight", (dtypes.int32,), f"N/{columns} K@{rows}*{2 * BITS}", Role.WORD),
            TensorSpec("scales", (dtypes.uint8,), f"K/{rows} N@{columns}*{per_column}", Role.WORD),
            TensorSpec("column_scales", (dtypes.float32,), f"N@{columns}", Role.SCALE),
        )

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(N, K) with the padding."""
        return self.qweight.shape[0] * strips.TILE_N, self.qweight.shape[1] // (2 * BITS)

    def plain_scales(self) -> Tensor:
        """Stored exponents (N, K / 32), uint8, without padding."""
        N, K = self.shape
        stored = strips.group_scales(mxfp8.GROUP).undo(self.scales)[: K // mxfp8.GROUP, :N].T
        return EXPONENTS.decode(stored, self.column_scales[:N])

    def codes(self) -> spec.Codes:
        """Return the bytes, their values, and the powers of two, without padding."""
        (N, K), device = self.shape, self.device
        packed = strips.rows(BITS).packed(self.qweight)
        codes = packed if packed.shape == (K, N) else ClippedCodes(packed, (K, N))
        return spec.Codes(
            bits=BITS,
            codes=codes.T,
            scales=fp4.e8m0(self.plain_scales()),
            zeros=None,
            k_group=torch.arange(K, device=device) // mxfp8.GROUP,
            lookup=byte_values(torch.float8_e4m3fn, device),
        )


def from_mxfp8(weight: MXFP8Weight, *, whole: MXFP8Weight | None = None) -> Mxfp8StripsWeight:
    """Convert exactly, with padding, or raise RepackError; `whole`: the layer, if this is a share of it."""
    reason = find_unsupported(whole or weight)
    if reason:
        raise RepackError(weight.format, "strips", reason)
    N, K = weight.shape
    Np, Kp = -(-N // strips.TILE_N) * strips.TILE_N, -(-K // strips.TILE_K) * strips.TILE_K
    stored, columns = EXPONENTS.encode(weight.exponents)
    return Mxfp8StripsWeight(
        config=Mxfp8StripsConfig(weight.weight_scale.dtype),
        qweight=pack_bytes(weight.weight.view(torch.uint8)),
        scales=strips.group_scales(mxfp8.GROUP).apply(pad_matrix(stored.T, Kp // mxfp8.GROUP, Np)),
        column_scales=torch.nn.functional.pad(columns, (0, Np - N)),
        layer=record_origin(weight),
    )


def to_mxfp8(weight: Mxfp8StripsWeight) -> MXFP8Weight:
    """Invert `from_mxfp8`, bit for bit."""
    origin = weight.layer.origin
    config = MXFP8Weight.example
    if isinstance(origin, Origin) and origin.weight_type is MXFP8Weight:
        config = origin.config
    exponents = weight.plain_scales().contiguous().view(TORCH[weight.config.exponents])
    return MXFP8Weight(
        config=config,
        weight=weight.codes().plain().to(torch.uint8).contiguous().view(torch.float8_e4m3fn),
        weight_scale=swizzle.swizzle_scales(exponents) if config.swizzled else exponents,
        layer=weight.layer,
    )


def find_unsupported(weight: MXFP8Weight) -> str | None:
    """Return the reason if strips cannot represent a weight, else None; reads scales, and no codes."""
    name = named(weight.layer.name or weight.format, "weight_scale")
    exponents = weight.exponents
    padding = weight.config.swizzled and swizzle.find_padding(weight.weight_scale, *exponents.shape)
    return (
        padding
        or describe_scales(name, exponents, exponents == E8M0_NAN, "NaN")
        or describe_scales(name, exponents, EXPONENTS.find_far(exponents), EXPONENTS.far)
    )
