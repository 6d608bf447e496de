"""nf4 and fp4 of bitsandbytes in strips: codes of a table of 16, and scales in float32.

    qweight        int32  (N/64, K*8)       codes in `layouts.strips`
    scales         fp32   (K/128, N*128/g)  in the order `layouts.strips.group_scales`; g = 64 or 128
    column_scales  fp32   (N,)              one power of two per output

    w[n, k] = table[code] * (scales[k / g, n] * column_scales[n])

The largest scale of an output is in [2**14, 2**15), so that products of 16-bit numbers are normal in float16.
A block of more than 128 inputs is stored as several groups with equal scales.

Kernels round table and scales to the dtype of the activations, and their product once more, as bitsandbytes
does for one token: with u half a unit of that dtype, a weight is within (1 + u)**3 of its value.
`column_scales` multiply sums in float32. `dequantize` has no such error. K is padded to 128 and N to 64, with
codes and scales of 0.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from qload import devices, dtypes, spec
from qload.dtypes import TORCH
from qload.errors import ArgumentError, RepackError
from qload.formats import BNB4Weight
from qload.kernel_formats.fp4_marlin import CODE_PACKING, FP4_BITS, as_codes
from qload.layouts import fp4, strips
from qload.layouts.bnb import TABLES
from qload.spec import Role, TensorSpec
from qload.spec.integers import Origin, pad_matrix, record_origin

GROUP_SIZES = (64, 128)
LARGEST_POWER = 15  # the largest scale of an output is below 2**15
MAX_SPAN = 20  # log2 between scales of an output whose products are normal in float16
MIN_SCALE = 2.0**-100  # whose column scale is normal in float32


@dataclass(frozen=True)
class TableStripsConfig(spec.Grouped, spec.Config):
    """Config of nf4 or fp4 of bitsandbytes in strips; ArgumentError for other groups.

    Attributes
    ----------
    quant_type
        "nf4" or "fp4": the table.
    group_size
        Inputs that share a scale: 64 or 128.
    """

    name: ClassVar[str] = "table_strips"

    quant_type: Literal["nf4", "fp4"]
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ArgumentError(f"{self.name}: group_size", "64 or 128", str(self.group_size))


@dataclass(frozen=True, eq=False, repr=False)
class TableStripsWeight(spec.Weight):
    """An nf4 or fp4 weight of bitsandbytes in strips of 64 columns, qload's order for its CUDA kernels.

    K is padded to a multiple of 128 and N to one of 64.

    Attributes
    ----------
    qweight
        Codes of `qload.layouts.strips`: (N / 64, K * 8), int32.
    scales
        By `column_scales`, in the order `qload.layouts.strips.group_scales`: (K / 128, N * 128 / group_size),
        float32.
    column_scales
        A power of two per output: (N,), float32.
    """

    config: TableStripsConfig
    qweight: Tensor
    scales: Tensor
    column_scales: Tensor

    format: ClassVar[str] = "table_strips"
    example: ClassVar[TableStripsConfig] = TableStripsConfig("nf4")
    further: ClassVar[tuple[TableStripsConfig, ...]] = (TableStripsConfig("fp4", 128),)

    @classmethod
    def tensors(cls, config: TableStripsConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors for padded K and N."""
        fp32, rows, columns = (dtypes.float32,), strips.TILE_K, strips.TILE_N
        per_column = rows // config.group_size
        return (
            TensorSpec("qweight", (dtypes.int32,), f"N/{columns} K@{rows}*{2 * FP4_BITS}", Role.WORD),
            TensorSpec("scales", fp32, f"K/{rows} N@{columns}*{per_column}", Role.SCALE),
            TensorSpec("column_scales", fp32, f"N@{columns}", Role.SCALE),
        )

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(N, K) with the padding."""
        return self.qweight.shape[0] * strips.TILE_N, self.qweight.shape[1] // (2 * FP4_BITS)

    def plain_scales(self) -> Tensor:
        """Scales of groups (N, G) in float32, without padding."""
        N, K = self.shape
        plain = strips.group_scales(self.config.group_size).undo(self.scales)[: self.config.groups(K), :N].T
        return plain * self.column_scales[:N, None]

    def codes(self) -> spec.Codes:
        """Return the codes, their values, and the scale of each group, without padding."""
        table = _table(self.config.quant_type, self.device)
        return as_codes(self, strips.rows(FP4_BITS), self.plain_scales(), table)


def from_bnb4(weight: BNB4Weight, *, whole: BNB4Weight | None = None) -> TableStripsWeight:
    """Convert exactly, with padding, or raise RepackError; `whole`: the layer, if this is a share of it."""
    reason = find_unsupported(whole or weight)
    if reason:
        raise RepackError(weight.format, "strips", reason)
    (N, K), blocksize = weight.shape, weight.config.blocksize
    size = min(blocksize, strips.TILE_K)
    Np, Kp = -(-N // strips.TILE_N) * strips.TILE_N, -(-K // strips.TILE_K) * strips.TILE_K
    stored = weight.absmax.reshape(N, K // blocksize).repeat_interleave(blocksize // size, 1)
    columns = _column_scales(stored)
    codes = CODE_PACKING.packed(_swapped(weight.weight, N, K).view(torch.int32)).T
    padded = codes if (Np, Kp) == (N, K) else pad_matrix(devices.plain(codes), Kp, Np)
    scales = pad_matrix((stored / columns[:, None]).T, Kp // size, Np)
    return TableStripsWeight(
        config=TableStripsConfig(weight.config.quant_type, size),
        qweight=strips.rows(FP4_BITS).pack(padded),
        scales=strips.group_scales(size).apply(scales),
        column_scales=torch.nn.functional.pad(columns, (0, Np - N)),
        layer=record_origin(weight),
    )


def to_bnb4(weight: TableStripsWeight) -> BNB4Weight:
    """Invert `from_bnb4`, bit for bit; RepackError without an origin."""
    origin = weight.layer.origin
    if not isinstance(origin, Origin):
        raise RepackError(weight.format, "bnb", "it was built by hand: its stored dtype is unknown")
    config, (N, K), weight_type = origin.config, weight.shape, cast("type[BNB4Weight]", origin.weight_type)
    copies = config.blocksize // weight.config.group_size
    pairs = CODE_PACKING.pack(weight.codes().codes).view(torch.uint8)
    return weight_type(
        config=config,
        weight=_swapped(pairs, N, K).flatten().view(TORCH[config.storage])[:, None],
        absmax=weight.plain_scales()[:, ::copies].flatten().clone(memory_format=torch.contiguous_format),
        quant_map=_table(config.quant_type, weight.device),
        layer=weight.layer,
    )


def find_unsupported(weight: BNB4Weight) -> str | None:
    """Return the reason if strips cannot represent a weight, else None; reads no codes."""
    config, (N, K) = weight.config, weight.shape
    smallest, size = GROUP_SIZES
    if K % config.blocksize or (config.blocksize != smallest and config.blocksize % size):
        sizes = f"{smallest} or a multiple of {size}, within one output"
        return f"strips of {config.quant_type} have blocks of {sizes}, got {config.blocksize} of {K} inputs"
    table = _table(config.quant_type, weight.device)
    if not torch.equal(weight.quant_map.view(torch.int32), table.view(torch.int32)):
        return f"quant_map is not the table of {config.quant_type} in the kernels"
    scales = weight.absmax.reshape(N, K // config.blocksize).abs()
    if not scales.numel():
        return None
    largest = scales.amax(1, keepdim=True)
    small = (scales > 0) & (scales * 2.0**MAX_SPAN < largest)
    tiny = (largest > 0) & (largest < MIN_SCALE)
    if bool((~largest.isfinite() | tiny).any()):
        return f"strips of {config.quant_type} have finite scales from {MIN_SCALE:g} on in each output, or 0"
    if bool(small.any()):
        n, block = small.nonzero()[0].tolist()
        return (
            f"the scale of output {n} and block {block} is more than 2**{MAX_SPAN} times smaller than the "
            "largest of the output, too small for float16"
        )
    return None


def _column_scales(stored: Tensor) -> Tensor:
    """Return the column scales (N,) for the scales (N, G) of groups."""
    if not stored.shape[1]:
        return stored.new_ones(stored.shape[0])
    exponents = torch.frexp(stored.abs().amax(1)).exponent - LARGEST_POWER
    return fp4.e8m0((exponents + 127).to(torch.uint8))


def _table(quant_type: str, device: torch.device) -> Tensor:
    """Return the values of codes, float32 (16,); computed on the device, as a CUDA graph allows no copy."""
    values = [torch.full((1,), value, dtype=torch.float32, device=device) for value in TABLES[quant_type]]
    return torch.cat(values)


def _swapped(stored: Tensor, N: int, K: int) -> Tensor:
    """Exchange the codes of each byte; bytes (N, K / 2)."""
    pairs = stored.contiguous().view(torch.uint8).reshape(N, K // 2)
    return (pairs >> 4) | (pairs << 4)
