"""Integer codes in plain order: the intermediate form of every integer layout.

Every layout of integer weights is converted to and from `Integers`, so that no layout depends on another.
Nothing is padded or permuted. K may end within a word; the target layout checks its own limits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Self, TypeVar

from qload import devices
from qload.dtypes import STORED, Dtype, DtypeLike
from qload.errors import RepackError
from qload.layouts import Order, PackedCodes, Packing, Stored, ZeroPoints, gptq
from qload.layouts.packing import pack_codes, reorder
from qload.lazy_torch import Tensor, torch
from qload.sentences import WORD_BITS
from qload.spec.weight import Codes, Config, Layer, Weight

LAYOUT_BITS = (2, 3, 4, 8)  # of codes in kernel orders
KERNEL_BITS = (5, 6)  # of codes in qload's own orders alone
Offset = Literal["none", "weight", "code"]
HEADER_INPUTS = 256  # of a block with a header
UNUSED_BITS = "the unused bits of a word are not 0, and would be lost"


@dataclass(frozen=True)
class Origin(Config):
    """Record of the checkpoint weight, for `restore`.

    Attributes
    ----------
    weight_type, config
        Type and config of the checkpoint weight.
    index_dtype
        Dtype of its group index; None: it has no index.
    stores_zeros
        Whether it stores zero points that are optional; they are kept even if all are 2**(bits - 1). Of NVFP4
        in GGUF: whether it stores a second scale.
    integer_dtype
        Dtype of its codes or zero points, if the format has several.
    """

    name: ClassVar[str] = "origin"

    weight_type: type[Weight]
    config: Any
    index_dtype: torch.dtype | None = None
    stores_zeros: bool = False
    integer_dtype: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class Integers:
    """Codes with scales and integer zero points, and perhaps with float offsets, of each group g = g_idx[k].

    By `offset`, the value from which offsets are subtracted:

        none     w[k, n] = scales[g, n] * (codes[k, n] - zeros[g, n])
        weight   w[k, n] = scales[g, n] * (codes[k, n] - zeros[g, n]) - offsets[g, n]
        code     w[k, n] = scales[g, n] * (codes[k, n] - offsets[g, n])         zeros are 0

    Attributes
    ----------
    bits
        Bits of a code.
    group_size
        Inputs that share a scale; -1: one group.
    unpack
        Return the codes (K, N); not called by checks of what a layout supports.
    scales, zeros
        Scales and zero points (G, N).
    g_idx
        Group of each input: (K,).
    layer
        The layer, with its `Origin`.
    offset, offsets
        Kind of the offsets, and the offsets (G, N) in the dtype of the scales; None: no offsets.
    rounding
        Dtype that the checkpoint's format rounds each step to; None: float32.
    header
        Bytes of blocks of `HEADER_INPUTS` inputs that `restore` needs beside the other tensors: uint8
        (bytes, N); None: not needed.
    convention
        Stored form of the zero points in the source.
    whole
        The whole layer if this is a share of it. Its values decide all refusals, equally on every rank.
    gptq_words
        The codes as words of GPTQ, if they were read from GPTQ.
    known_symmetric
        Whether all zero points are known to be 2**(bits - 1).
    known_in_order
        Whether rows are known to be in group order.
    out
        A weight of the target type; its large tensors receive the result.
    deferred_writes
        Writes to `out`, to be run after the last check.
    """

    bits: int
    group_size: int
    unpack: Callable[[], Tensor | devices.LazyCodes]
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    layer: Layer
    offset: Offset = "none"
    offsets: Tensor | None = None
    rounding: DtypeLike | None = None
    header: Tensor | None = None
    convention: ZeroPoints = field(default_factory=Stored)
    whole: Integers | None = None
    gptq_words: Tensor | None = None
    known_symmetric: bool = False
    known_in_order: bool = False
    out: Weight | None = None
    deferred_writes: list[Callable[[], object]] = field(default_factory=list)

    def pack_codes(self, name: str, packing: Packing, codes: Tensor | devices.LazyCodes) -> Tensor:
        """Pack `codes` into words: a new tensor, or tensor `name` of `out` with a deferred write."""
        out: Tensor | None = getattr(self.out, name, None)
        if out is None or not self._fits(out, packing.shape_of_words(codes.shape), torch.int32):
            return pack_codes(packing, codes)
        self.deferred_writes.append(partial(packing.pack, codes, out))
        return out

    def reorder(self, name: str, order: Order, tensor: Tensor) -> Tensor:
        """Apply `order` to a matrix: a new tensor, or tensor `name` of `out` with a deferred write."""
        out: Tensor | None = getattr(self.out, name, None)
        if out is None or not self._fits(out, tensor.shape, tensor.dtype):
            return reorder(order, tensor)
        self.deferred_writes.append(partial(order.apply, tensor, out))
        return out

    def _fits(self, out: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether a result may be written to `out`; `repack` refuses any other."""
        is_alike = (tuple(out.shape), out.dtype, out.device) == (tuple(shape), dtype, self.scales.device)
        return is_alike and out.is_contiguous()

    @property
    def origin(self) -> Origin:
        """Record of the checkpoint weight."""
        origin = self.layer.origin
        assert isinstance(origin, Origin)  # set by every `to_integers`
        return origin

    @property
    def source(self) -> str:
        """Format of the checkpoint weight, for messages."""
        return self.origin.weight_type.format

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.layer.N, self.layer.K

    @property
    def groups(self) -> int:
        """Number of groups in this weight or share."""
        return self.scales.shape[0]

    @property
    def whole_layer(self) -> Integers:
        """The whole layer if it is known, else this weight."""
        return self.whole or self

    @cached_property
    def span(self) -> tuple[int, int]:
        """Lowest and highest zero point of the whole layer; 2**(bits - 1) if there are no outputs."""
        whole = self.whole_layer
        if whole.known_symmetric or not whole.zeros.numel():
            return (2 ** (self.bits - 1),) * 2
        lowest, highest = torch.stack(torch.aminmax(whole.zeros)).tolist()  # one device synchronization
        return int(lowest), int(highest)

    @property
    def symmetric(self) -> bool:
        """True if every zero point is 2**(bits - 1); a kernel then needs no zero points."""
        return self.span == (2 ** (self.bits - 1),) * 2

    @property
    def header_bytes(self) -> int:
        """Bytes of the header for each block of `HEADER_INPUTS` inputs; 0 without one."""
        return 0 if self.header is None else len(self.header) * HEADER_INPUTS // self.layer.K

    @property
    def has_default_zeros(self) -> bool:
        """True if every zero point is that of weights without stored zero points."""
        return self.span == (default_zero(self.bits, self.offset),) * 2

    @cached_property
    def in_order(self) -> bool:
        """True if rows are in group order and all groups but the last have `group_size` rows."""
        size, K, groups = self.group_size, self.layer.K, self.groups
        if groups == 1 or self.known_in_order:
            return True
        if size == -1 or -(-K // size) != groups:
            return False
        return bool((self.g_idx == torch.arange(K, device=self.g_idx.device) // size).all())

    @cached_property
    def group_order(self) -> Tensor | None:
        """Stable order of rows by group: (K,), int64; None: rows are in group order."""
        return None if self.in_order else torch.argsort(self.g_idx, stable=True)

    def reject(self, layout: str, reason: str | None) -> None:
        """Raise RepackError if there is a `reason` against `layout`."""
        if reason:
            raise RepackError(self.source, layout, reason)

    def pack_zero_points(self, convention: ZeroPoints) -> Tensor:
        """Pack zero points along N as GPTQ does; RepackError for values beyond the `convention`."""
        (lower, upper), (lowest, highest) = convention.span(self.bits), self.span
        for value, violation in ((highest, f"above {upper}"), (lowest, f"below {lower}")):
            if value > upper or value < lower:
                self.reject(f"zero points {convention.name}", f"a zero point of {value} is {violation}")
        return convention.write(self.zeros.contiguous(), gptq.columns(self.bits))

    def find_short_words(self) -> str | None:
        """Return the reason if rows or columns do not fill the words of GPTQ, else None."""
        fill = WORD_BITS if self.bits == 3 else WORD_BITS // self.bits
        for dim, size in zip("NK", self.shape, strict=True):
            if size % fill:
                return f"{dim} = {size} is not a multiple of {fill}: short words"
        return None

    def find_unordered_groups(self, layout: str) -> str | None:
        """Return the reason if these groups need a group index, which `layout` lacks; else None.

        All ranks return the same.
        """
        whole, size, K = self.whole_layer, self.whole_layer.group_size, self.layer.K
        if whole.groups == 1:
            return None
        if K % size and size % K:
            return f"K = {K} does not divide into groups of {size}"
        if not whole.in_order or not self.in_order:
            return f"the rows of its groups are not in order along K (act order), and {layout} has no g_idx"
        return None

    def find_tile_conflict(
        self, layout: str, rows: int, columns: int, scale_dtypes: Sequence[Dtype]
    ) -> str | None:
        """Return the reason if tiles without zero points and index cannot represent these; else None."""
        (N, K), dtype = self.shape, self.scales.dtype
        if K % rows or N % columns:
            return f"needs K, N in multiples of {rows}, {columns}; got {K}, {N}"
        reason = self.find_unordered_groups(layout)
        if reason:
            return reason
        if not self.symmetric:
            return f"a zero point is not {2 ** (self.bits - 1)}, and {layout} stores no zero points"
        if STORED[dtype] not in scale_dtypes:
            names = " or ".join(each.name for each in scale_dtypes)
            return f"needs scales in {names}, got {str(dtype).removeprefix('torch.')}"
        return None


@dataclass(frozen=True, eq=False)
class KernelIntegers(Integers):
    """Integers for qload's own kernel orders alone: with offsets, or with codes of 5 or 6 bits.

    The key of such weights in the tables of `repack`.
    """


@dataclass(frozen=True, eq=False, repr=False)
class IntegerWeight(Weight):
    """Base of checkpoint weights with integer codes, which are repacked through `Integers`.

    `codes_field` is the tensor of codes if no refusal of a layout depends on its values, else "".
    """

    codes_field: ClassVar[str] = ""

    @abstractmethod
    def to_integers(self) -> Integers:
        """Convert to plain integers; RepackError if they cannot represent the weight."""

    @classmethod
    @abstractmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert `integers` exactly, or raise RepackError; `origin`: the checkpoint weight to restore."""

    @classmethod
    def describe_unsupported(cls, config: Any) -> str | None:
        """Return the reason why no weight of a `config` is repacked, else None."""
        return None

    def skippable_tensor(self) -> str:
        """Name of the tensor whose values affect no refusal; "" if there is none."""
        return self.codes_field

    def has_ordered_groups(self) -> bool:
        """Return True if the config of a loaded weight says that its groups are in order."""
        return False


def record_origin(
    weight: Weight,
    index: Tensor | None = None,
    *,
    stores_zeros: bool = False,
    integer_dtype: torch.dtype | None = None,
) -> Layer:
    """Return the layer of a weight with its origin recorded; an earlier origin stays."""
    if weight.layer.origin is not None:
        return weight.layer
    origin = Origin(
        type(weight), weight.config, None if index is None else index.dtype, stores_zeros, integer_dtype
    )
    return weight.layer.with_origin(origin, weight.layer.activations)


def find_unsupported_bits(bits: int) -> str | None:
    """Return the reason if no other layout holds codes of so many bits, else None."""
    if bits in LAYOUT_BITS:
        return None
    expected = f"{', '.join(map(str, LAYOUT_BITS[:-1]))} or {LAYOUT_BITS[-1]}"
    return f"other layouts have {expected} bits, got {bits}"


def needs_own_order(config: Any) -> bool:
    """Return True if weights of a config are `KernelIntegers`, as only qload's own orders represent them."""
    return getattr(config, "has_offsets", False) or getattr(config, "bits", None) in KERNEL_BITS


def default_zero(bits: int, offset: Offset) -> int:
    """Return the zero point of weights without stored zero points: 0 with offsets, else 2**(bits - 1)."""
    return 2 ** (bits - 1) if offset == "none" else 0


def with_bits(integers: Integers, bits: int) -> Integers:
    """Return the same weight with codes of `bits` bits: codes and zero points move with 2**(bits - 1)."""
    if bits == integers.bits:
        return integers
    shift = 2 ** (bits - 1) - 2 ** (integers.bits - 1)
    return replace(
        integers,
        bits=bits,
        unpack=lambda: devices.plain(integers.unpack()) + shift,
        zeros=integers.zeros + shift,
        whole=None if integers.whole is None else with_bits(integers.whole, bits),
        gptq_words=None,
    )


def default_zero_points(bits: int, scales: Tensor, offset: Offset = "none") -> Tensor:
    """Return zero points (G, N) for formats without stored zero points."""
    return torch.full_like(scales, default_zero(bits, offset), dtype=torch.int32)


def from_ordered_groups(
    weight: Weight,
    unpack: Callable[[], Tensor | devices.LazyCodes],
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    offset: Offset = "none",
    offsets: Tensor | None = None,
    rounding: DtypeLike | None = None,
) -> Integers:
    """Return the integers of a checkpoint weight with groups in order.

    `zeros`: stored zero points (G, N); None: all are the default. Other arguments: as in `Integers`.
    """
    config: Any = weight.config
    if offsets is not None and offsets.dtype != scales.dtype:
        names = " and ".join(str(each.dtype).removeprefix("torch.") for each in (scales, offsets))
        raise RepackError(weight.layer.name or weight.format, "integers", f"scales and offsets are {names}")
    return Integers(
        bits=config.bits,
        group_size=config.group_size,
        unpack=unpack,
        scales=scales,
        zeros=default_zero_points(config.bits, scales, offset) if zeros is None else zeros,
        g_idx=config.in_order(weight.layer.K, scales.device),
        layer=record_origin(weight, stores_zeros=zeros is not None),
        offset=offset,
        offsets=offsets,
        rounding=rounding,
    )


def from_codes(codes: Codes, scales: Tensor, layer: Layer, group_size: int) -> Integers:
    """Return the integers of `codes`, with their `scales` (G, N) in the stored dtype.

    The convention of zero points is that of the origin.
    """
    assert codes.k_group is not None
    config = layer.origin.config if isinstance(layer.origin, Origin) else None
    zeros = getattr(config, "zeros", None)
    return Integers(
        bits=codes.bits,
        group_size=group_size,
        unpack=lambda: codes.codes.T,
        scales=scales,
        zeros=torch.zeros_like(scales, dtype=torch.int32) if codes.zeros is None else codes.zeros.T,
        g_idx=codes.k_group,
        layer=layer,
        convention=zeros if isinstance(zeros, ZeroPoints) else Stored(),
    )


def pad_matrix(matrix: Tensor, rows: int, columns: int, value: int = 0) -> Tensor:
    """Pad a matrix to (`rows`, `columns`) with `value`; a matrix of this shape is returned itself."""
    if matrix.shape == (rows, columns):
        return matrix
    padded = matrix.new_full((rows, columns), value)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


R = TypeVar("R", "Tensor", PackedCodes)


def unpermute_rows(rows: R, perm: Tensor | None) -> R:
    """Move row i to row perm[i]: undo a kernel's row order. None: no permutation."""
    if perm is None:
        return rows
    moved = rows[invert_perm(perm)]
    assert isinstance(moved, type(rows))  # packed codes are still along K
    return moved


def invert_perm(perm: Tensor) -> Tensor:
    """Return the inverse of a permutation, in the same dtype."""
    inverse = torch.empty_like(perm)
    inverse[perm.long()] = torch.arange(perm.numel(), dtype=perm.dtype, device=perm.device)
    return inverse
