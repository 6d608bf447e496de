"""Integers in strips, qload's order for its CUDA kernels: GPTQ, AWQ, MLX and others.

    qweight  int32             (N/64, K*b*2)     codes in `layouts.strips`, rows in the order of perm
    scales   fp16, bf16, fp32  (G, N)            in Marlin's order
    qzeros   int32             (G, N*b/32)       in Marlin's order; absent: all are 2**(b-1)
    offsets  as the scales     (G, N)            subtracted from the weight; absent: no offsets
    header   uint8             (B*h, N)          h bytes of each block of 256 inputs, for `restore`
    g_idx    int32             (K,)              group of each row of qweight, sorted; absent: in order
    perm     int32             (K,)              row i of qweight is input perm[i]; absent: no permutation

Codes of 2 and 3 bits are stored with 4, of 5 and 6 bits with 8. Without offsets codes and zero points then
grow by the difference of 2**(bits - 1), so that symmetric weights stay without zero points.

Float zero points of codes are stored as offsets: their products with the scales, in float32 as the scales.

Offsets and headers are in Marlin's order of several groups, also if there is one group. With offsets all
zero points are equal; the config has their value.

K is padded to 128 and whole groups, N to 64, with weights of 0 as in Marlin's order. A row share in act order
with incomplete groups is refused: the kernels compute the group of a row from its number. Marlin's kernel
looks it up.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import ClassVar

import torch
from torch import Tensor

from qload import dtypes, spec
from qload.devices import StoredCodes
from qload.dtypes import STORED, TORCH, DtypeLike
from qload.errors import ArgumentError
from qload.kernel_formats import marlin
from qload.kernel_formats.marlin import GPTQMarlinConfig, GPTQMarlinWeight
from qload.layouts import strips
from qload.layouts.marlin import SCALES_GROUPED as COLUMNS
from qload.layouts.packing import Packing
from qload.spec import Role, TensorSpec
from qload.spec.integers import HEADER_INPUTS, Integers, Offset, pad_matrix, with_bits

BYTES = Packing(8, "n (k r) -> n k (r)", r=4)  # rows of bytes
CODE_BITS = (2, 3, 4, 5, 6, 8)  # of the checkpoint
CAPABILITY = 80  # compute capability of Ampere, times 10


@dataclass(frozen=True)
class StripsConfig(GPTQMarlinConfig):
    """Config of a weight in strips.

    `is_k_full` is always True. The other attributes are those of `GPTQMarlinConfig`, and these:

    Attributes
    ----------
    offset
        What the checkpoint's offsets are subtracted from: "weight", or "code", whose products with the scales
        are stored; "none": there are no offsets.
    zero
        Zero point of all codes with offsets.
    rounding
        Dtype that `dequantize` rounds each step to, as the checkpoint's format does; None: float32.
    header
        Bytes of a block of 256 inputs for `restore`.
    dtype
        Dtype of the checkpoint's scales and offsets, if float32 is stored in its place.

    Raises
    ------
    ArgumentError
        Also for stored zero points beside offsets, and a `zero` that is no code.
    """

    name: ClassVar[str] = "strips"

    offset: Offset = "none"
    zero: int = 0
    rounding: DtypeLike | None = None
    header: int = 0
    dtype: DtypeLike | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_offsets and self.zero_point:
            raise ArgumentError(f"{self.name}: zero_point", "False with offsets", "True")
        if not 0 <= self.zero < 2**self.bits:
            raise ArgumentError(f"{self.name}: zero", f"a code of {self.bits} bits", str(self.zero))
        for name in ("rounding", "dtype"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, STORED[value])

    @property
    def has_offsets(self) -> bool:
        """True if offsets are stored."""
        return self.offset != "none"

    def declared(self) -> tuple[TensorSpec, ...]:
        """Declare the tensors of a layer with this config."""
        return StripsWeight.tensors(self)


@dataclass(frozen=True, eq=False, repr=False)
class StripsWeight(GPTQMarlinWeight):
    """A weight of integers in strips of 64 columns, qload's order for its CUDA kernels.

    K is padded to a multiple of 128 and N to one of 64. The other attributes are those of `GPTQMarlinWeight`.

    Attributes
    ----------
    qweight
        Codes, rows in the order of perm (`qload.layouts.strips`): (N / 64, K * bits * 2), int32.
    offsets
        Offsets of the weight, in the order of scales of several groups: (G, N), dtype of the scales; None: no
        offsets.
    header
        Bytes for `restore`, in the same order: (K / 256 * header, N), uint8; None: not needed.
    """

    config: StripsConfig
    offsets: Tensor | None = None
    header: Tensor | None = None

    format: ClassVar[str] = "strips"
    supports_incomplete_groups: ClassVar[bool] = False
    example: ClassVar[StripsConfig] = StripsConfig(4, 128, zero_point=True, act_order=True)

    @staticmethod
    def order(bits: int) -> Packing:
        """Packing of codes with `bits` bits."""
        return strips.rows(bits)

    @staticmethod
    def axes(config: GPTQMarlinConfig) -> str:
        """Declared axes of `qweight` for a `config`."""
        never = "!" if config.act_order else ""
        return f"N/{strips.TILE_N} K@{strips.TILE_K}*{2 * config.bits}{never}"

    @staticmethod
    def padded(N: int, K: int, group_size: int) -> tuple[int, int]:
        """Pad (`N`, `K`) to whole units of a warp and whole groups of `group_size`."""
        step = lcm(strips.TILE_K, max(group_size, 1))
        return -(-N // strips.TILE_N) * strips.TILE_N, -(-K // step) * step

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(N, K) with the padding."""
        return self.qweight.shape[0] * strips.TILE_N, self.qweight.shape[1] // (2 * self.config.bits)

    @property
    def is_wide(self) -> bool:
        """True if kernels read scales and offsets in float32."""
        return self.offsets is not None and self.scales.dtype == torch.float32

    @classmethod
    def tensors(cls, config: StripsConfig) -> tuple[TensorSpec, ...]:  # type: ignore[override]
        """Declare the tensors for padded K and N; with act order K is never cut."""
        specs = super().tensors(config)
        if not config.has_offsets:
            return specs
        scales = next(spec for spec in specs if spec.name == "scales")
        signed = replace(scales, signed=True)
        others = [replace(signed, name="offsets")]
        if config.header:
            axes = f"K/{HEADER_INPUTS}*{config.header} N@{strips.TILE_N}"
            others.append(TensorSpec("header", (dtypes.uint8,), axes, Role.WORD))
        return (*(signed if spec is scales else spec for spec in specs), *others)

    def plain_columns(self, name: str) -> Tensor | None:
        """Tensor `name`, offsets or header, in plain order without padding of N; None: not stored."""
        stored = getattr(self, name)
        return None if stored is None else COLUMNS.undo(stored)[:, : self.layer.N]

    def stored(self) -> StoredCodes | None:
        """Describe the stored order for kernels; None with padding, permuted rows or other roundings."""
        stored = super().stored()
        if stored is None or self.offsets is None:
            return stored
        if self.config.rounding is not None or self.config.offset == "code":
            return None
        return replace(stored, zero=self.config.zero, offsets=self.offsets.T, offset_order=COLUMNS)

    def codes(self) -> spec.Codes:
        """Return codes, scales, zero points and offsets in the order of inputs, without padding."""
        codes, offsets = super().codes(), self.plain_columns("offsets")
        if offsets is None:
            return codes
        offsets = offsets[: codes.scales.shape[1]].float().T
        if self.config.offset == "code":
            return replace(codes, zeros=offsets / codes.scales, rounding=self.config.rounding)
        zeros = torch.full_like(codes.scales, self.config.zero, dtype=torch.int32)
        return replace(codes, zeros=zeros, offsets=offsets, rounding=self.config.rounding)


def are_faster(capability: int | None) -> bool:
    """Return True if strips are faster than Marlin's order on a chip of `capability`, times 10."""
    return capability is not None and capability >= CAPABILITY


def pack_bytes(stored: Tensor, fill: int = 0) -> Tensor:
    """Pack bytes (N, K) as codes of 8 bits in strips, padded with `fill`; whole tiles move as words."""
    (N, K), rows, columns = stored.shape, strips.TILE_K, strips.TILE_N
    Np, Kp = -(-N // columns) * columns, -(-K // rows) * rows
    order = strips.rows(8)
    if (Np, Kp) == (N, K) and stored.is_contiguous() and stored.storage_offset() % 4 == 0:
        return order.pack(BYTES.packed(stored.view(torch.int32)).T)
    return order.pack(pad_matrix(stored.T.contiguous(), Kp, Np, fill))


def from_integers(integers: Integers, keep_zeros: bool = False) -> StripsWeight:
    """Convert exactly, or raise RepackError; `keep_zeros` as in `marlin.from_integers`."""
    if integers.offsets is not None:
        return _from_offsets(integers, integers.offsets)
    widened = with_bits(integers, width_of(integers.bits))
    weight = marlin.from_integers(widened, keep_zeros, StripsWeight)
    assert isinstance(weight, StripsWeight)
    return weight


def _from_offsets(integers: Integers, offsets: Tensor) -> StripsWeight:
    """Convert integers with offsets; wider codes keep their values."""
    integers.reject("strips", find_unsupported_offsets(integers))
    dtype = None
    if integers.offset == "code":
        dtype, scales = offsets.dtype, integers.scales.float()
        integers, offsets = replace(integers, scales=scales), offsets.float() * scales
    weight = marlin.from_integers(_without_offsets(integers), weight_type=StripsWeight)
    groups, columns = weight.scales.shape
    stored, header = marlin.copy_and_pad(offsets, weight.config.copies, groups, columns, 0), integers.header
    config = StripsConfig(
        weight.config.bits,
        weight.config.group_size,
        act_order=weight.config.act_order,
        copies=weight.config.copies,
        offset=integers.offset,
        zero=integers.span[0],
        rounding=integers.rounding,
        dtype=dtype,
        header=integers.header_bytes,
    )
    tensors = {
        **weight.fields(),
        "qzeros": None,
        "offsets": integers.reorder("offsets", COLUMNS, stored),
        "header": None if header is None else COLUMNS.apply(pad_matrix(header, len(header), columns)),
    }
    return StripsWeight.unchecked(config, weight.layer, tensors)


def _without_offsets(integers: Integers) -> Integers:
    """Return codes, in the bits that strips store, and scales of `integers` as a symmetric weight."""
    bits, whole = width_of(integers.bits), integers.whole
    return replace(
        integers,
        bits=bits,
        zeros=torch.full_like(integers.scales, 2 ** (bits - 1), dtype=torch.int32),
        known_symmetric=True,
        whole=None if whole is None else _without_offsets(whole),
        gptq_words=None,
        offset="none",
        offsets=None,
        rounding=None,
        header=None,
    )


def find_unsupported_offsets(integers: Integers) -> str | None:
    """Return the reason if strips do not have offsets like these, else None; all ranks return the same."""
    whole = integers.whole_layer
    is_wide = whole.scales.dtype == torch.float32 or whole.offset == "code"
    if whole.offset == "code" and not _are_restored(whole):
        return "products of its scales and float zero points in float32 do not determine the zero points"
    if is_wide and whole.groups == 1:
        return "the kernels read float32 scales of several groups, got one group"
    lowest, highest = integers.span
    if lowest != highest:
        return f"the kernels read one zero point beside offsets, got {lowest} to {highest}"
    return None


def _are_restored(integers: Integers) -> bool:
    """Return whether quotients of the stored offsets and scales are the float zero points."""
    assert integers.offsets is not None
    scales, offsets = integers.scales.float(), integers.offsets.float()
    return bool((offsets * scales / scales == offsets).all())


def width_of(bits: int) -> int:
    """Return the bits of a stored code."""
    return min(width for width in strips.BITS if width >= bits)


def to_integers(weight: StripsWeight) -> Integers:
    """Convert to plain integers with the bits of the checkpoint, in the order of inputs."""
    integers = marlin.to_integers(weight)
    bits = getattr(integers.origin.config, "bits", integers.bits)
    offsets, copies = weight.plain_columns("offsets"), weight.config.copies
    if offsets is None:
        return with_bits(integers, bits)
    scales, offsets = integers.scales, offsets[::copies][: integers.groups]
    if weight.config.offset == "code":
        dtype = TORCH[weight.config.dtype or dtypes.float32]
        scales, offsets = scales.to(dtype), (offsets / scales).to(dtype)
        integers = replace(integers, zeros=torch.zeros_like(scales, dtype=torch.int32))
    return replace(
        integers,
        bits=bits,
        scales=scales,
        offset=weight.config.offset,
        offsets=offsets,
        rounding=weight.config.rounding,
        header=weight.plain_columns("header"),
    )
