"""GPTQ and AWQ in the order of Marlin's tensor-core kernel.

    qweight  int32             (K/16, N*b/2)     codes in `layouts.marlin`, rows in the order of perm
    scales   fp16, bf16, fp32  (G, N)            permuted; one row is one scale per column
    qzeros   int32             (G, N*b/32)       zero points, permuted; absent: all are 2**(b-1)
    g_idx    int32             (K,)              group of each row of qweight, sorted; absent: in order
    perm     int32             (K,)              row i of qweight is input perm[i]; absent: no permutation

A group of a size that the kernel does not support, such as 256 or 96 rows, is stored as several groups with
equal scales and zero points; `copies` is their number.

A thread block takes 128 rows of 64 columns, or 64 rows of 128. Other shapes are padded to whole thread blocks
and whole groups: with rows of weight 0, where x is padded with zeros, and with columns that the output drops.
This is the shape rule of the compiled kernels; the Python in front of some of them is stricter.

With `is_k_full` every group is complete, and the kernel computes the group of row i as i / group_size. A row
share in act order, or cut within a group, has incomplete groups; the kernel then reads g_idx for each row.

Source: vLLM 0.11.0 and TGI db931fcf, byte-equal to both.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import ClassVar

import torch
from torch import Tensor

from qload import devices, dtypes, spec
from qload.devices import StoredCodes
from qload.errors import ArgumentError, ShapeError
from qload.formats.gptq import SCALES
from qload.layouts import ClippedCodes, Stored, marlin
from qload.layouts.packing import Packing
from qload.spec import Role, TensorSpec
from qload.spec.integers import (
    Integers,
    Origin,
    from_codes,
    pad_matrix,
    record_origin,
    unpermute_rows,
)

GROUP_SIZES = (-1, 32, 64, 128)
THREAD_BLOCKS = ((64, 128), (128, 64))  # columns, rows
MIN_THREAD_N = 64
MAX_PARALLEL = 16
LOCKS_PER_MULTIPROCESSOR = 4
SPARSE_MIN_THREAD_N = 128
SPARSE_MAX_PARALLEL = 64


def fits_thread_blocks(N: int, K: int) -> bool:
    """Return True if a layer is whole thread blocks without padding."""
    return any(N % columns == 0 and K % rows == 0 for columns, rows in THREAD_BLOCKS)


def pad_shape(N: int, K: int, group_size: int) -> tuple[int, int]:
    """Pad (N, K) to whole thread blocks and whole groups: the smallest area, then the smallest sum."""
    group = max(group_size, 1)
    sizes = [(_round_up(N, columns), _round_up(K, lcm(rows, group))) for columns, rows in THREAD_BLOCKS]
    return min(sizes, key=lambda size: (size[0] * size[1], sum(size)))


def split_group(group_size: int) -> tuple[int, int] | None:
    """Split a group into equal groups of the largest supported size: (size, number), or None.

    A group of 256 rows becomes two groups of 128 with equal scales.
    """
    if group_size in GROUP_SIZES:
        return group_size, 1
    sizes = [size for size in GROUP_SIZES if size > 0 and group_size % size == 0]
    return (max(sizes), group_size // max(sizes)) if sizes and group_size > 0 else None


def count_locks(N: int, multiprocessors: int, *, sparse: bool = False) -> int:
    """Return the int32 locks of a zeroed workspace for N columns, for older and newer kernels.

    Older kernels need 16 locks per 64 columns (2:4 sparse: 64 per 128 columns); newer ones four per
    multiprocessor.
    """
    if sparse:
        return -(-N // SPARSE_MIN_THREAD_N) * SPARSE_MAX_PARALLEL
    return max(-(-N // MIN_THREAD_N) * MAX_PARALLEL, LOCKS_PER_MULTIPROCESSOR * multiprocessors)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True)
class GPTQMarlinConfig(spec.Grouped, spec.Config):
    """Config of a weight in Marlin's order.

    Attributes
    ----------
    bits
        Bits of a code: 4 or 8.
    group_size
        Inputs that share a scale in the kernel; -1: one scale per column.
    zero_point
        Whether zero points are stored.
    act_order
        Whether rows are permuted and have a group index.
    is_k_full
        Whether every group is complete, so that row i is of group i / group_size.
    copies
        Number of successive kernel groups for one group of the source weight.

    Raises
    ------
    ArgumentError
        For other bits, for a group size other than -1 below 1, and for copies of a group of all inputs.
    """

    name: ClassVar[str] = "marlin"

    bits: int
    group_size: int
    zero_point: bool = False
    act_order: bool = False
    is_k_full: bool = True
    copies: int = 1

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *marlin.BITS)
        self.check_group_size()
        if self.copies < 1 or (self.copies > 1 and self.group_size == -1):
            expected = "1, or more for a group_size other than -1"
            raise ArgumentError(f"{self.name}: copies", expected, str(self.copies))

    @property
    def stored_group_size(self) -> int:
        """Group size of the source weight."""
        return self.group_size if self.group_size == -1 else self.group_size * self.copies

    def for_layer(self, headers: spec.LayerHeaders) -> "GPTQMarlinConfig":
        """Check the number of groups if `is_k_full`: ShapeError for missing scales."""
        sizes = headers.sizes(self.declared())
        groups = self.groups(sizes["K"])
        if self.act_order and self.is_k_full and sizes["G"] != groups:
            raise ShapeError(
                headers.names.full("scales"),
                f"({groups}, {sizes['N']}) = (K/{self.group_size}, N), as is_k_full says",
                headers.shapes["scales"],
            )
        return self

    def declared(self) -> tuple[TensorSpec, ...]:
        """Declare the tensors of a layer with this config."""
        return GPTQMarlinWeight.tensors(self)


@dataclass(frozen=True, eq=False, repr=False)
class GPTQMarlinWeight(spec.Weight):
    """A GPTQ or AWQ weight in the order of Marlin's kernel.

    K and N are padded to whole thread blocks. Source: vLLM and TGI, byte-equal to their tensors.

    Attributes
    ----------
    qweight
        Codes, rows in the order of perm (`qload.layouts.marlin`): (K / 16, N * bits / 2), int32.
    scales
        Permuted scales; one row is one scale per column: (G, N), fp16, bf16 or fp32.
    qzeros
        Zero points, permuted: (G, N * bits / 32), int32; None: all are 2**(bits - 1).
    g_idx
        Group of each row of qweight, sorted: (K,), int32; None: in order.
    perm
        Row i of qweight is input perm[i]: (K,), int32; None: no permutation.
    """

    config: GPTQMarlinConfig
    qweight: Tensor
    scales: Tensor
    qzeros: Tensor | None = None
    g_idx: Tensor | None = None
    perm: Tensor | None = None

    format: ClassVar[str] = "gptq_marlin"
    supports_incomplete_groups: ClassVar[bool] = True
    example: ClassVar[GPTQMarlinConfig] = GPTQMarlinConfig(4, 128, zero_point=True, act_order=True)

    @staticmethod
    def order(bits: int) -> Packing:
        """Packing of codes with `bits` bits."""
        return marlin.rows(bits)

    @staticmethod
    def axes(config: GPTQMarlinConfig) -> str:
        """Declared axes of `qweight` for a `config`."""
        return f"K/16{'!' if config.act_order else ''} N@64*{config.bits // 2}"

    @staticmethod
    def padded(N: int, K: int, group_size: int) -> tuple[int, int]:
        """Pad (`N`, `K`) to whole thread blocks and whole groups of `group_size`."""
        return pad_shape(N, K, group_size)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(N, K) with padding."""
        return self.scales.shape[1], self.qweight.shape[0] * marlin.TILE_K

    @classmethod
    def tensors(cls, config: GPTQMarlinConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors for padded K and N; with act order K is never cut."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        if config.act_order:
            groups = "G"
        specs = [
            TensorSpec("qweight", (dtypes.int32,), cls.axes(config), Role.WORD),
            TensorSpec("scales", SCALES, f"{groups} N@64", Role.SCALE),
        ]
        if config.zero_point:
            specs.append(TensorSpec("qzeros", (dtypes.int32,), f"{groups} N@64*{config.bits}/32", Role.WORD))
        if config.act_order:
            index = (dtypes.int32,)
            specs.append(TensorSpec("g_idx", index, "K!", Role.INDEX, fact=True, index_of="G"))
            specs.append(TensorSpec("perm", index, "K!", Role.INDEX, fact=True, permutation=True))
        return tuple(specs)

    def plain_scales(self) -> Tensor:
        """Scales (G, N) in plain order and their own dtype, with padding."""
        return marlin.scales(self.scales.shape[0]).undo(self.scales)

    def stored(self) -> StoredCodes | None:
        """Describe the stored order for kernels; None with padding or permuted rows."""
        bits, groups = self.config.bits, self.scales.shape[0]
        if self.perm is not None or self.padded_shape != self.shape:
            return None
        return StoredCodes(
            codes=self.order(bits).packed(self.qweight).T,
            scales=self.scales.T,
            zeros=self.qzeros,
            zero_rule=Stored().rule(bits),
            run=self.config.rows_of_a_group(self.layer.K),
            scale_order=marlin.scales(groups),
            zero_order=marlin.zeros(bits).codes,
        )

    def codes(self) -> spec.Codes:
        """Return codes, scales and zero points in the order of inputs, in kernel groups, without padding."""
        (N, K), bits = self.shape, self.config.bits
        packed = unpermute_rows(self.order(bits).packed(self.qweight), self.perm)
        codes = packed if packed.shape == (K, N) else ClippedCodes(packed, (K, N))
        k_group = self.config.in_order(packed.shape[0], self.qweight.device)
        if self.g_idx is not None and not self.config.is_k_full:
            k_group = self.g_idx.long()
        k_group = unpermute_rows(k_group, self.perm)[:K]
        groups = self.config.groups(K) if self.config.is_k_full else self.scales.shape[0]
        plain = spec.symmetric(bits, codes, self.plain_scales()[:groups, :N], k_group)
        if self.qzeros is None:
            return plain
        zeros = Stored().read(self.qzeros, marlin.zeros(bits))
        return replace(plain, zeros=zeros[:groups, :N].T)


def to_integers(weight: GPTQMarlinWeight) -> Integers:
    """Convert to plain integers, in the order of inputs and without padding."""
    layer = record_origin(weight, weight.g_idx, stores_zeros=weight.config.zero_point)
    group_size, copies = weight.config.stored_group_size, weight.config.copies
    if not weight.config.is_k_full and isinstance(layer.origin, Origin):  # the kernel reads g_idx instead
        group_size = getattr(layer.origin.config, "group_size", None) or group_size
    codes = weight.codes()
    scales = weight.plain_scales()[: codes.scales.shape[1], : weight.layer.N]
    integers = from_codes(codes, scales, layer, group_size)
    if copies == 1:
        return integers
    g_idx = integers.g_idx // copies
    return replace(integers, scales=scales[::copies], zeros=integers.zeros[::copies], g_idx=g_idx)


def from_integers(
    integers: Integers,
    keep_zeros: bool = False,
    weight_type: type[GPTQMarlinWeight] = GPTQMarlinWeight,
) -> GPTQMarlinWeight:
    """Convert exactly, with padding, or raise RepackError.

    Zero points that are all 2**(bits - 1) are left out, unless `keep_zeros` or the checkpoint stores them.
    `weight_type`: a subclass with another order of codes.
    """
    name = weight_type.example.name
    integers.reject(name, find_unsupported(integers))
    (N, K), bits, groups = integers.shape, integers.bits, integers.groups
    config, perm, g_idx = _order_rows(integers, weight_type)
    if not (config.is_k_full or weight_type.supports_incomplete_groups):
        integers.reject(name, "rows of its groups are on other ranks (act order)")
    Np, Kp = weight_type.padded(N, K, config.group_size)
    zero_point = keep_zeros or integers.origin.stores_zeros or not integers.symmetric
    codes = integers.unpack()

    rows = groups if config.act_order and not config.is_k_full else config.groups(Kp)
    zeros = copy_and_pad(integers.zeros, config.copies, rows, Np, 2 ** (bits - 1))
    scales = copy_and_pad(integers.scales, config.copies, rows, Np, 0)
    padded = codes if perm is None else codes[perm[:K]]
    if (Np, Kp) != (N, K):
        g_idx = config.in_order(Kp, zeros.device) if g_idx is None else g_idx
        inner, padded = devices.plain(padded), zeros[g_idx]  # a code equal to its zero point has weight 0
        padded[:K, :N] = inner
    tensors = {
        "qweight": integers.pack_codes("qweight", weight_type.order(bits), padded),
        "scales": integers.reorder("scales", marlin.scales(rows), scales),
        "qzeros": Stored().write(zeros.contiguous(), marlin.zeros(bits)) if zero_point else None,
        "g_idx": None if g_idx is None or perm is None else g_idx.to(torch.int32),
        "perm": None if perm is None else perm.to(torch.int32),
    }
    return weight_type.unchecked(replace(config, zero_point=zero_point), integers.layer, tensors)


def find_unsupported(integers: Integers) -> str | None:
    """Return the reason if Marlin's kernel cannot read a weight, else None; all ranks return the same."""
    bits, size, highest = integers.bits, integers.whole_layer.group_size, integers.span[1]
    if bits not in marlin.BITS:
        return f"Marlin's kernel reads 4 or 8 bits, got {bits}"
    if integers.whole_layer.groups > 1 and split_group(size) is None:
        sizes = ", ".join(map(str, GROUP_SIZES[1:]))
        return f"Marlin's kernel reads groups of {sizes}, multiples of them, or one group, got {size}"
    if highest >= 2**bits:
        return f"a zero point of {highest} does not fit {bits} bits"
    return None


def _order_rows(
    integers: Integers, weight_type: type[GPTQMarlinWeight]
) -> tuple[GPTQMarlinConfig, Tensor | None, Tensor | None]:
    """Return the config, the permutation of padded rows, and the group of each; None and None: in order."""
    (N, K), groups, device = integers.shape, integers.groups, integers.g_idx.device
    size, copies = (split_group(integers.group_size) or (integers.group_size, 1)) if groups > 1 else (-1, 1)
    config = type(weight_type.example)(integers.bits, size, copies=copies)
    perm = integers.group_order
    if perm is None:
        return config, None, None
    _, Kp = weight_type.padded(N, K, config.group_size)
    group, padded = config.in_order(K, device), config.in_order(Kp, device)
    ordered = integers.g_idx[perm].long()
    is_k_full = -(-config.groups(K) // copies) == groups and bool((ordered == group // copies).all())
    g_idx = padded if is_k_full else torch.cat([ordered, torch.full_like(padded[K:], groups - 1)])
    config = replace(config, act_order=True, is_k_full=is_k_full, copies=copies if is_k_full else 1)
    return config, torch.cat([perm, torch.arange(K, Kp, device=device)]), g_idx


def copy_and_pad(tensor: Tensor, copies: int, rows: int, columns: int, value: int) -> Tensor:
    """Repeat each row `copies` times, then pad to (`rows`, `columns`) with `value`."""
    tensor = tensor if copies == 1 else tensor.repeat_interleave(copies, 0)[:rows]
    return pad_matrix(tensor, rows, columns, value)
