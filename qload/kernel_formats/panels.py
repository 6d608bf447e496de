"""GPTQ, AWQ and other integers in panels, qload's order for its CPU kernels.

    qweight  int32             (N/16, K*s/2)   codes in `layouts.panels` of s bits, rows in the order of perm
    scales   fp16, bf16, fp32  (N/16, G*16)    16 columns of every group, then the next 16
    zeros    uint8             (N/16, G*16)    zero points in the same order; absent: the default
    offsets  as the scales     (N/16, G*16)    in the same order; by `offset` subtracted from weight or code
    header   uint8             (N/16, B*h*16)  h bytes of each block of 256 inputs, for `restore` alone
    perm     int32             (K,)            row i of qweight is input perm[i]; absent: no permutation

Codes of up to 4 bits have s = 4, all others s = 8. The default zero point is 2**(b-1), or 0 with offsets. N
is padded to whole panels. The rows of each group are padded to whole words: with s = 4 to a multiple of 8, so
that a group of 20 inputs takes 24 rows. Padding has weight 0. A row share in act order with incomplete groups
is refused: the kernels compute the group of a row from its number.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from qload import devices, dtypes, spec
from qload.dtypes import STORED, DtypeLike
from qload.formats.gptq import SCALES
from qload.layouts import ClippedCodes, panels
from qload.sentences import WORD_BITS
from qload.spec import Role, TensorSpec
from qload.spec.integers import (
    HEADER_INPUTS,
    Integers,
    Offset,
    default_zero,
    from_codes,
    pad_matrix,
    record_origin,
)

MAX_ZERO_POINT = 255
CODE_BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class PanelsConfig(spec.Grouped, spec.Config):
    """Config of a weight in panels.

    Attributes
    ----------
    bits
        Bits of a code: 2, 3, 4, 5, 6 or 8.
    group_size
        Inputs that share a scale; -1: one scale per column.
    zero_point
        Whether zero points are stored.
    act_order
        Whether rows are permuted.
    offset
        What the offsets are subtracted from: "weight" or "code"; "none": there are no offsets.
    rounding
        Dtype that `dequantize` rounds each step to, as the checkpoint's format does; None: float32.
    header
        Bytes of a block of 256 inputs for `restore`.

    Raises
    ------
    ArgumentError
        For other bits, and for a group size other than -1 below 1.
    """

    name: ClassVar[str] = "panels"

    bits: int
    group_size: int
    zero_point: bool = False
    act_order: bool = False
    offset: Offset = "none"
    rounding: DtypeLike | None = None
    header: int = 0

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *CODE_BITS)
        self.check_group_size()
        if self.rounding is not None:
            object.__setattr__(self, "rounding", STORED[self.rounding])

    @cached_property
    def stored_bits(self) -> int:
        """Bits of a stored code: 4 or 8."""
        return min(bits for bits in panels.BITS if bits >= self.bits)

    @property
    def has_offsets(self) -> bool:
        """True if offsets are stored."""
        return self.offset != "none"

    @property
    def default_zero(self) -> int:
        """Zero point of all codes of a weight without stored zero points."""
        return default_zero(self.bits, self.offset)

    @cached_property
    def word_rows(self) -> int:
        """Rows per word."""
        return WORD_BITS // self.stored_bits

    def run(self, K: int) -> int:
        """Rows of a group of a layer with `K` inputs, padded to whole words."""
        return -(-self.rows_of_a_group(K) // self.word_rows) * self.word_rows

    def places(self, K: int, device: torch.device | None = None) -> Tensor:
        """Padded position of each of `K` rows in the order of perm: int64 (`K`,) on `device`."""
        row, size = torch.arange(K, device=device), self.rows_of_a_group(K)
        return row // size * self.run(K) + row % size


@dataclass(frozen=True, eq=False, repr=False)
class PanelsWeight(spec.Weight):
    """A GPTQ or AWQ weight in panels of 16 columns, qload's order for CPUs.

    N is padded to a multiple of 16, and the rows of each group to whole words.

    Attributes
    ----------
    qweight
        Codes, rows in the order of perm (`qload.layouts.panels`): (N / 16, K * bits / 2), int32.
    scales
        Scales of each panel, group after group: (N / 16, G * 16), fp16, bf16 or fp32.
    zeros
        Zero points in the same order: (N / 16, G * 16), uint8; None: all are the config's `default_zero`.
    perm
        Row i of qweight, without padding, is input perm[i]: (K,), int32; None: no permutation.
    offsets
        Offsets in the order and dtype of the scales; None: no offsets.
    header
        Bytes for `restore`: (N / 16, K / 256 * header * 16), uint8; None: not needed.
    """

    config: PanelsConfig
    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    perm: Tensor | None = None
    offsets: Tensor | None = None
    header: Tensor | None = None

    format: ClassVar[str] = "panels"
    example: ClassVar[PanelsConfig] = PanelsConfig(4, 128, zero_point=True, act_order=True)

    @classmethod
    def tensors(cls, config: PanelsConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors for padded K and N; with act order K is never cut."""
        uncut, size, outputs = "!" if config.act_order else "", config.group_size, f"N/{panels.TILE_N}"
        words, groups = f"K@{config.word_rows}*{config.stored_bits // 2}", f"{panels.TILE_N}"
        if size != -1:
            words = f"K@{size}*{config.run(size) * config.stored_bits // 2}/{size}"
            groups = f"K@{size}/{size}*{panels.TILE_N}{uncut}"
        specs = [
            TensorSpec("qweight", (dtypes.int32,), f"{outputs} {words}{uncut}", Role.WORD),
            TensorSpec("scales", SCALES, f"{outputs} {groups}", Role.SCALE, signed=config.has_offsets),
        ]
        if config.zero_point:
            specs.append(TensorSpec("zeros", (dtypes.uint8,), f"{outputs} {groups}", Role.WORD))
        if config.act_order:
            specs.append(TensorSpec("perm", (dtypes.int32,), "K!", Role.INDEX, fact=True, permutation=True))
        if config.has_offsets:
            specs.append(TensorSpec("offsets", SCALES, f"{outputs} {groups}", Role.SCALE, signed=True))
        if config.header:
            header = f"{outputs} K/{HEADER_INPUTS}*{config.header * panels.TILE_N}"
            specs.append(TensorSpec("header", (dtypes.uint8,), header, Role.WORD))
        return tuple(specs)

    @property
    def rows(self) -> int:
        """Rows of a panel, with padding."""
        return self.qweight.shape[1] * 2 // self.config.stored_bits

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(N, K) with padding."""
        return self.qweight.shape[0] * panels.TILE_N, self.rows

    def codes(self) -> spec.Codes:
        """Return codes, scales and zero points in the order of inputs, without padding."""
        (N, K), bits = self.shape, self.config.bits
        packed, position = panels.rows(self.config.stored_bits).packed(self.qweight), self._input_positions()
        codes: Tensor | devices.LazyCodes
        if packed.shape == (K, N):
            codes = packed if position is None else packed[position]
        else:
            codes = ClippedCodes(packed, (K, N)) if position is None else packed.plain()[position, :N]
        k_group = self.config.in_order(K, self.qweight.device)
        if self.perm is not None:
            k_group = torch.empty_like(k_group).index_copy_(0, self.perm.long(), k_group)
        scales = self.plain_groups("scales").T
        if self.zeros is None:
            zeros = torch.full_like(scales, self.config.default_zero, dtype=torch.int32)
        else:
            zeros = self.plain_groups("zeros").int().T
        offsets = self.plain_groups("offsets").float().T if self.config.has_offsets else None
        is_zero = self.config.offset == "code"
        return spec.Codes(
            bits=bits,
            codes=codes.T,
            scales=scales.float(),
            zeros=offsets if is_zero else zeros,
            offsets=None if is_zero else offsets,
            rounding=self.config.rounding,
            k_group=k_group,
        )

    def plain_groups(self, name: str) -> Tensor:
        """Return the tensor `name` in plain order, such as scales (G, N), without padding."""
        stored: Tensor = getattr(self, name)
        return panels.SCALES.undo(stored)[:, : self.layer.N]

    def _input_positions(self) -> Tensor | None:
        """Padded row of each input; None: input k is row k."""
        K, config = self.layer.K, self.config
        if self.perm is None and (config.group_size == -1 or config.run(K) == config.group_size):
            return None
        position = config.places(K, self.qweight.device)
        if self.perm is None:
            return position
        return torch.empty_like(position).index_copy_(0, self.perm.long(), position)


def to_integers(weight: PanelsWeight) -> Integers:
    """Convert to plain integers, in the order of inputs and without padding."""
    config, scales = weight.config, weight.plain_groups("scales")
    layer = record_origin(weight, weight.perm, stores_zeros=config.zero_point)
    codes = weight.codes()
    if config.offset == "code":  # float zero points are the offsets
        codes = replace(codes, zeros=None)
    return replace(
        from_codes(codes, scales, layer, config.group_size),
        offset=config.offset,
        offsets=weight.plain_groups("offsets") if config.has_offsets else None,
        rounding=config.rounding,
        header=weight.plain_groups("header") if config.header else None,
    )


def from_integers(integers: Integers) -> PanelsWeight:
    """Convert exactly, with padding, or raise RepackError.

    Zero points that are all the default are left out, unless the checkpoint stores them.
    """
    integers.reject("panels", find_unsupported(integers))
    perm = integers.group_order
    config = PanelsConfig(
        integers.bits,
        integers.group_size if integers.groups > 1 else -1,
        zero_point=integers.origin.stores_zeros or not integers.has_default_zeros,
        act_order=perm is not None,
        offset=integers.offset,
        rounding=integers.rounding,
        header=integers.header_bytes,
    )
    zeros = integers.zeros.to(torch.uint8) if config.zero_point else None
    tensors = {
        "qweight": integers.pack_codes(
            "qweight", panels.rows(config.stored_bits), _pad_codes(integers, config, perm)
        ),
        "scales": integers.reorder("scales", panels.SCALES, _pad_columns(integers.scales)),
        "perm": None if perm is None else perm.to(torch.int32),
    }
    for name, tensor in (("zeros", zeros), ("offsets", integers.offsets), ("header", integers.header)):
        tensors[name] = None if tensor is None else panels.SCALES.apply(_pad_columns(tensor))
    return PanelsWeight.unchecked(config, integers.layer, tensors)


def find_unsupported(integers: Integers) -> str | None:
    """Return the reason for which `from_integers` would refuse a weight, else None; reads no codes."""
    if integers.bits not in CODE_BITS:
        return f"codes of {integers.bits} bits"
    lowest, highest = integers.span
    if lowest < 0 or highest > MAX_ZERO_POINT:
        return f"a zero point of {lowest if lowest < 0 else highest} does not fit a byte"
    perm = integers.group_order
    if perm is None:
        return None
    size, K = integers.group_size, integers.layer.K
    expected = torch.arange(K, device=perm.device) // size
    if -(-K // size) == integers.groups and bool((integers.g_idx[perm].long() == expected).all()):
        return None
    if integers.layer.whole[1] == K:
        return "its groups are not of one size (act order)"
    return "rows of its groups are on other ranks (act order)"


def _pad_codes(integers: Integers, config: PanelsConfig, perm: Tensor | None) -> Tensor | devices.LazyCodes:
    """Return codes (rows, columns) in the order of `perm`, with padding."""
    (N, K), codes = integers.shape, integers.unpack()
    permuted = codes if perm is None else codes[perm]
    rows, columns = config.groups(K) * config.run(K), _round_up(N)
    if (rows, columns) == (K, N):
        return permuted
    plain = devices.plain(permuted)
    padded = plain.new_zeros(rows, columns)
    padded[config.places(K, plain.device), :N] = plain
    return padded


def _pad_columns(tensor: Tensor) -> Tensor:
    """Pad (G, N) with columns of zeros to whole panels."""
    return pad_matrix(tensor, tensor.shape[0], _round_up(tensor.shape[1]))


def _round_up(N: int) -> int:
    return -(-N // panels.TILE_N) * panels.TILE_N
