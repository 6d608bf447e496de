"""Marlin's kernel format: GPTQ and AWQ as its tensor-core kernel reads them, and the way back.

    qweight  int32             (K/16, N*b/2)     codes in `layouts.marlin`, rows in the order of perm
    scales   fp16, bf16, fp32  (G, N)            permuted; one row is one scale a column
    qzeros   int32             (G, N*b/32)       zero points, permuted; absent: all are 2**(b-1)
    g_idx    int32             (K,)              the group of each row of qweight, sorted; absent: in order
    perm     int32             (K,)              row i of qweight is input perm[i]; absent: in order

Groups that the kernel does not read, of 256 rows or 96, are several of those that it does, with equal scales
and zero points: `copies` says how many. K and N are padded to what the kernel's thread blocks divide: rows
whose value is 0 (x gets zeros there), columns that are cut off the output. `is_k_full` says that the rows of
every group are here, so that the kernel may take row i to be of group i / group_size; where a cut of K took
rows of a permuted group away, it looks every row's group up.

Source: vLLM 0.11.0 and TGI db931fcf, byte-equal to both.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import ClassVar

import torch
from torch import Tensor

from qload import devices, spec
from qload.devices import StoredCodes
from qload.errors import ArgumentError, RepackError, ShapeError
from qload.formats import GPTQConfig, MarlinWeight
from qload.formats.gptq import SCALES
from qload.kernel_formats.plain_integers import Integers, Origin, middle_zero_points, put_back, with_origin
from qload.layouts import ClippedCodes, Stored, marlin
from qload.layouts.packing import Packing
from qload.spec import Role, TensorSpec

GROUP_SIZES = (-1, 32, 64, 128)  # of the kernels
THREAD_BLOCKS = ((64, 128), (128, 64))  # columns, rows
MIN_THREAD_N = 64
MAX_PARALLEL = 16
LOCKS_PER_MULTIPROCESSOR = 4
SPARSE_MIN_THREAD_N = 128
SPARSE_MAX_PARALLEL = 64


def divides(N: int, K: int) -> bool:
    """Whether thread blocks divide a layer without padding."""
    return any(N % columns == 0 and K % rows == 0 for columns, rows in THREAD_BLOCKS)


def padded(N: int, K: int, group_size: int) -> tuple[int, int]:
    """(N, K) padded to whole thread blocks and whole groups: the smallest area, then the smallest sum."""
    group = max(group_size, 1)
    sizes = [(_up(N, columns), _up(K, lcm(rows, group))) for columns, rows in THREAD_BLOCKS]
    return min(sizes, key=lambda size: (size[0] * size[1], sum(size)))


def cut(group_size: int) -> tuple[int, int] | None:
    """The largest group that kernels read, and how many of them a group is; None: it is no multiple of one.

    Groups of 256 rows are two of 128 that have one scale.
    """
    if group_size in GROUP_SIZES:
        return group_size, 1
    sizes = [size for size in GROUP_SIZES if size > 0 and group_size % size == 0]
    return (max(sizes), group_size // max(sizes)) if sizes and group_size > 0 else None


def locks(N: int, multiprocessors: int, *, sparse: bool = False) -> int:
    """How many int32 of zeroed workspace serve N columns: enough for the old kernels' rule and the new.

    The old one counts blocks of columns, 16 (2:4: 64) times over; the new one multiprocessors, four
    blocks on each at the most.
    """
    if sparse:
        return -(-N // SPARSE_MIN_THREAD_N) * SPARSE_MAX_PARALLEL
    return max(-(-N // MIN_THREAD_N) * MAX_PARALLEL, LOCKS_PER_MULTIPROCESSOR * multiprocessors)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True)
class GPTQMarlinConfig(spec.Grouped, spec.Config):
    """What is to be known of a weight in Marlin's order.

    Attributes
    ----------
    bits
        Of a code: 4 or 8.
    group_size
        Inputs that share a scale, as the kernel groups them; -1: one scale a column.
    zero_point
        Whether zero points are stored.
    act_order
        Whether rows are permuted and grouped by index.
    is_k_full
        Whether the rows of every group are here, so that row i is of group i / group_size.
    copies
        How many of these groups, one after another, are one group of the weight that was repacked.

    Raises
    ------
    ArgumentError
        For other bits, for a group size below 1 that is not -1, and for copies of a group of all inputs.
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
            expected = "1, or more of groups that have a size"
            raise ArgumentError(f"{self.name}: copies", expected, str(self.copies))

    @property
    def stored_group_size(self) -> int:
        """That of the weight that was repacked."""
        return self.group_size if self.group_size == -1 else self.group_size * self.copies

    def for_layer(self, headers: spec.LayerHeaders) -> "GPTQMarlinConfig":
        """This config, unless rows that are all here lack groups: ShapeError."""
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
        """The declaration of every tensor of such a layer."""
        return GPTQMarlinWeight.tensors(self)


@dataclass(frozen=True, eq=False, repr=False)
class GPTQMarlinWeight(spec.Weight):
    """A GPTQ or AWQ weight in the order Marlin's kernel reads.

    K and N are padded to what the kernel's thread blocks divide. Source: vLLM and TGI, to whose tensors it is
    byte-equal.

    Attributes
    ----------
    qweight
        Codes, rows in the order of perm (`qload.layouts.marlin`): (K / 16, N * bits / 2), int32.
    scales
        Permuted; one row is one scale a column: (G, N), fp16, bf16 or fp32.
    qzeros
        Zero points, permuted: (G, N * bits / 32), int32; None: all are 2**(bits - 1).
    g_idx
        The group of each row of qweight, sorted: (K,), int32; None: in order.
    perm
        Row i of qweight is input perm[i]: (K,), int32; None: in order.
    """

    config: GPTQMarlinConfig
    qweight: Tensor
    scales: Tensor
    qzeros: Tensor | None = None
    g_idx: Tensor | None = None
    perm: Tensor | None = None

    format: ClassVar[str] = "gptq_marlin"
    allows_shares: ClassVar[bool] = True  # of an act order, whose groups have rows elsewhere
    example: ClassVar[GPTQMarlinConfig] = GPTQMarlinConfig(4, 128, zero_point=True, act_order=True)

    @staticmethod
    def order(bits: int) -> Packing:
        """Where codes of `bits` bits lie."""
        return marlin.rows(bits)

    @staticmethod
    def axes(config: GPTQMarlinConfig) -> str:
        """The axes of the words of a weight with this `config`."""
        return f"K/16{'!' if config.act_order else ''} N@64*{config.bits // 2}"

    @staticmethod
    def padded(N: int, K: int, group_size: int) -> tuple[int, int]:
        """(`N`, `K`) padded to whole thread blocks and whole groups of `group_size`."""
        return padded(N, K, group_size)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(N, K) with the padding."""
        return self.scales.shape[1], self.qweight.shape[0] * marlin.TILE_K

    @classmethod
    def tensors(cls, config: GPTQMarlinConfig) -> tuple[TensorSpec, ...]:
        """Of the padded K and N. Rows of an act order are permuted, so that K is never cut."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        if config.act_order:
            groups = "G"
        specs = [
            TensorSpec("qweight", (torch.int32,), cls.axes(config), Role.WORD),
            TensorSpec("scales", SCALES, f"{groups} N@64", Role.SCALE),
        ]
        if config.zero_point:
            specs.append(TensorSpec("qzeros", (torch.int32,), f"{groups} N@64*{config.bits}/32", Role.WORD))
        if config.act_order:
            index = (torch.int32,)
            specs.append(TensorSpec("g_idx", index, "K!", Role.INDEX, fact=True, index_of="G"))
            specs.append(TensorSpec("perm", index, "K!", Role.INDEX, fact=True, permutation=True))
        return tuple(specs)

    def plain_scales(self) -> Tensor:
        """The scales (G, N), padding included, in plain order and their own dtype."""
        return marlin.scales(self.scales.shape[0]).undo(self.scales)

    def stored(self) -> StoredCodes | None:
        """As it lies, where nothing is padded and rows are in order."""
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
        """Codes with every row back at its input, as the kernel groups them, without the padding."""
        (N, K), bits = self.shape, self.config.bits
        packed = put_back(self.order(bits).packed(self.qweight), self.perm)
        codes = packed if packed.shape == (K, N) else ClippedCodes(packed, (K, N))
        k_group = self.config.in_order(packed.shape[0], self.qweight.device)
        if self.g_idx is not None and not self.config.is_k_full:
            k_group = self.g_idx.long()
        k_group = put_back(k_group, self.perm)[:K]
        groups = self.config.groups(K) if self.config.is_k_full else self.scales.shape[0]
        plain = spec.symmetric(bits, codes, self.plain_scales()[:groups, :N], k_group)
        if self.qzeros is None:
            return plain
        zeros = Stored().read(self.qzeros, marlin.zeros(bits))
        return replace(plain, zeros=zeros[:groups, :N].T)


def read(weight: GPTQMarlinWeight) -> Integers:
    """Every row back at its input, without the padding."""
    codes, bits = weight.codes(), weight.config.bits
    assert codes.k_group is not None
    assert codes.zeros is not None
    layer = with_origin(weight, weight.g_idx, keeps_zeros=weight.config.zero_point)
    origin = layer.origin.config if isinstance(layer.origin, Origin) else None
    copies, known = weight.config.copies, getattr(origin, "group_size", None)
    looked_up = known if not weight.config.is_k_full else None  # there the kernel's own groups say nothing
    return Integers(
        bits=bits,
        group_size=looked_up or weight.config.stored_group_size,
        unpack=lambda: codes.codes.T,
        scales=weight.plain_scales()[: codes.scales.shape[1] : copies, : weight.layer.N],
        zeros=codes.zeros.T[::copies],
        g_idx=codes.k_group if copies == 1 else codes.k_group // copies,
        layer=layer,
        convention=origin.zeros if isinstance(origin, GPTQConfig) else Stored(),
    )


def write(
    integers: Integers, keep_zeros: bool = False, made: type[GPTQMarlinWeight] = GPTQMarlinWeight
) -> GPTQMarlinWeight:
    """Codes, scales and zero points in Marlin's orders, padded; exact, or RepackError with the reason.

    `keep_zeros`: zero points stay although all are 2**(bits - 1) and could be left out. `made`: with codes in
    another order.
    """
    reason = why_not(integers)
    if reason:
        raise RepackError(integers.source, made.example.name, reason)
    (N, K), bits, groups = integers.shape, integers.bits, integers.groups
    config, perm, g_idx = _rows(integers, made)
    if not (config.is_k_full or made.allows_shares):
        name = made.example.name
        raise RepackError(integers.source, name, "rows of its groups are on other ranks (act order)")
    Np, Kp = made.padded(N, K, config.group_size)
    symmetric, codes = not keep_zeros and integers.symmetric, integers.unpack()

    copies = config.copies
    rows = groups if config.act_order and not config.is_k_full else config.groups(Kp)
    wide_zeros = _pad(integers.zeros, copies, rows, Np, 2 ** (bits - 1))
    wide_scales = _pad(integers.scales, copies, rows, Np, 0)
    wide = codes if perm is None else codes[perm[:K]]
    if (Np, Kp) != (N, K):
        g_idx = config.in_order(Kp, wide_zeros.device) if g_idx is None else g_idx
        inner, wide = devices.plain(wide), wide_zeros[g_idx]  # padding has the code that means 0
        wide[:K, :N] = inner
    tensors = {
        "qweight": integers.packed("qweight", made.order(bits), wide),
        "scales": integers.ordered("scales", marlin.scales(rows), wide_scales),
        "qzeros": None if symmetric else Stored().write(wide_zeros.contiguous(), marlin.zeros(bits)),
        "g_idx": None if g_idx is None or perm is None else g_idx.to(torch.int32),
        "perm": None if perm is None else perm.to(torch.int32),
    }
    return made.unchecked(
        replace(config, zero_point=True) if not symmetric else config, integers.layer, tensors
    )


def read_checkpoint(weight: MarlinWeight) -> Integers:
    """A Marlin checkpoint's layer: symmetric, in order."""
    bits, scales = weight.config.bits, weight.plain_scales()
    return Integers(
        bits=bits,
        group_size=weight.config.group_size,
        unpack=lambda: marlin.rows(bits).packed(weight.B),
        scales=scales,
        zeros=middle_zero_points(bits, scales),
        g_idx=weight.config.in_order(weight.layer.K, scales.device),
        layer=with_origin(weight),
    )


def back_to_checkpoint(integers: Integers, origin: Origin) -> MarlinWeight:
    """As a Marlin checkpoint had it."""
    order = marlin.SCALES_PER_COLUMN if origin.config.group_size == -1 else marlin.SCALES_GROUPED
    return MarlinWeight(
        config=origin.config,
        B=integers.packed("B", marlin.rows(integers.bits), integers.unpack()),
        s=order.apply(integers.scales),
        layer=integers.layer,
    )


def why_not(integers: Integers) -> str | None:
    """Why Marlin's kernel cannot read a weight, or None; the same on every rank."""
    bits, size, highest = integers.bits, integers.decides.group_size, integers.span[1]
    if bits not in marlin.BITS:
        return f"Marlin's kernel reads 4 or 8 bits, got {bits}"
    if integers.decides.groups > 1 and cut(size) is None:
        sizes = ", ".join(map(str, GROUP_SIZES[1:]))
        return f"Marlin's kernel reads groups of {sizes}, multiples of them, or one group, got {size}"
    if highest >= 2**bits:
        return f"a zero point of {highest} does not fit {bits} bits"
    return None


def _rows(
    integers: Integers, made: type[GPTQMarlinWeight]
) -> tuple[GPTQMarlinConfig, Tensor | None, Tensor | None]:
    """The kernel's config, the permutation of the padded rows, and the group of each; None: in order."""
    (N, K), groups, device = integers.shape, integers.groups, integers.g_idx.device
    size, copies = (cut(integers.group_size) or (integers.group_size, 1)) if groups > 1 else (-1, 1)
    config = type(made.example)(integers.bits, size, copies=copies)
    if integers.in_order:
        return config, None, None
    _, Kp = made.padded(N, K, config.group_size)
    here, there = config.in_order(K, device), config.in_order(Kp, device)
    perm = torch.argsort(integers.g_idx, stable=True)
    ordered = integers.g_idx[perm].long()
    is_k_full = -(-config.groups(K) // copies) == groups and bool((ordered == here // copies).all())
    rest = torch.full_like(there[K:], groups - 1)
    g_idx = there if is_k_full else torch.cat([ordered, rest])
    config = replace(config, act_order=True, is_k_full=is_k_full, copies=copies if is_k_full else 1)
    return config, torch.cat([perm, torch.arange(K, Kp, device=device)]), g_idx


def _pad(tensor: Tensor, copies: int, rows: int, columns: int, value: int) -> Tensor:
    """Each row so many times, then as many rows and columns as asked for."""
    tensor = tensor if copies == 1 else tensor.repeat_interleave(copies, 0)[:rows]
    if tensor.shape == (rows, columns):
        return tensor
    wide = tensor.new_full((rows, columns), value)
    wide[: tensor.shape[0], : tensor.shape[1]] = tensor
    return wide
