"""Marlin's kernel format: GPTQ and AWQ as its tensor-core kernel reads them, and the way back.

    qweight  int32             (K/16, N*b/2)     codes in `layouts.marlin`, rows in the order of perm
    scales   fp16, bf16, fp32  (G, N)            permuted; one row is one scale a column
    qzeros   int32             (G, N*b/32)       zero points, permuted; absent: all are 2**(b-1)
    g_idx    int32             (K,)              the group of each row of qweight, sorted; absent: in order
    perm     int32             (K,)              row i of qweight is input perm[i]; absent: in order

K and N are padded to what the kernel's thread blocks divide: rows whose value is 0 (x gets zeros there),
columns that are cut off the output. `is_k_full` says that the rows of every group are here, so that the
kernel may take row i to be of group i / group_size; where a cut of K took rows of a permuted group away,
it looks every row's group up.

Source: formats.md section 4, byte-equal to vLLM and TGI.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.errors import RepackError, ShapeError
from qload.formats import GPTQConfig, GPTQWeight, MarlinConfig, MarlinWeight
from qload.formats.gptq import SCALES
from qload.kernels.gptq import from_codes, in_order, is_symmetric, zero_points
from qload.kernels.marlin_shapes import GROUP_SIZES, padded
from qload.kernels.permutation import put_back
from qload.layouts import Stored, gptq, marlin
from qload.spec import Role, TensorSpec


@dataclass(frozen=True)
class GPTQMarlinConfig(spec.Grouped, spec.Config):
    """`group_size` -1: one scale a column. `act_order`: whether rows are permuted and grouped by index."""

    name: ClassVar[str] = "marlin"

    bits: int
    group_size: int
    zero_point: bool = False
    act_order: bool = False
    is_k_full: bool = True
    index: torch.dtype = torch.int32  # of the g_idx that `restore` writes

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *marlin.BITS)
        self.check_group_size()

    def study(self, seen: spec.Seen) -> "GPTQMarlinConfig":
        """Rows that are all here have all their groups, or ShapeError."""
        sizes = seen.sizes(GPTQMarlinWeight.tensors(self))
        groups = self.groups(sizes["K"])
        if self.act_order and self.is_k_full and sizes["G"] != groups:
            raise ShapeError(
                seen.names.full("scales"),
                f"({groups}, {sizes['N']}) = (K/{self.group_size}, N), as is_k_full says",
                seen.shapes["scales"],
            )
        return self


@dataclass(frozen=True, eq=False, repr=False)
class GPTQMarlinWeight(spec.Weight):
    """A GPTQ or AWQ weight in the order Marlin's kernel reads."""

    config: GPTQMarlinConfig
    qweight: Tensor
    scales: Tensor
    qzeros: Tensor | None = None
    g_idx: Tensor | None = None
    perm: Tensor | None = None

    format: ClassVar[str] = "gptq_marlin"
    example: ClassVar[GPTQMarlinConfig] = GPTQMarlinConfig(4, 128, zero_point=True, act_order=True)

    @classmethod
    def tensors(cls, config: GPTQMarlinConfig) -> tuple[TensorSpec, ...]:
        """Of the padded K and N. Rows of an act order are permuted, so that K is never cut."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        never = "!" if config.act_order else ""
        if config.act_order:
            groups = "G"
        specs = [
            TensorSpec("qweight", (torch.int32,), f"K/16{never} N@64*{config.bits // 2}", Role.WORD),
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

    def codes(self) -> spec.Codes:
        """Codes with every row back at its input, as the kernel groups them, without the padding."""
        (N, K), bits = self.shape, self.config.bits
        codes = marlin.rows(bits).unpack(self.qweight)
        k_group = self.config.in_order(codes.shape[0], codes.device)
        if self.g_idx is not None and not self.config.is_k_full:
            k_group = self.g_idx.long()
        codes, k_group = put_back(codes, self.perm)[:K, :N], put_back(k_group, self.perm)[:K]
        groups = self.config.groups(K) if self.config.is_k_full else self.scales.shape[0]
        plain = spec.symmetric(bits, codes, self.plain_scales()[:groups, :N], k_group)
        if self.qzeros is None:
            return plain
        zeros = Stored().read(self.qzeros, marlin.zeros(bits))
        return replace(plain, zeros=zeros[:groups, :N].T)


def from_gptq(weight: GPTQWeight, keep_zeros: bool = False) -> GPTQMarlinWeight:
    """Codes, scales and zero points in Marlin's orders, padded; exact, or RepackError with the reason.

    `keep_zeros`: zero points stay although all are 2**(bits - 1) and could be left out.
    """
    reason = why_not(weight)
    if reason:
        raise RepackError("gptq", "marlin", reason)
    (N, K), bits = weight.shape, weight.config.bits
    groups = weight.scales.shape[0]
    config, perm, g_idx = _rows(weight)
    Np, Kp = padded(N, K, config.group_size)
    codes = gptq.rows(bits).unpack(weight.qweight)
    symmetric, middle = not keep_zeros and is_symmetric(weight), 2 ** (bits - 1)

    rows = groups if config.act_order and not config.is_k_full else config.groups(Kp)
    wide_zeros = _pad(zero_points(weight), rows, Np, middle)
    wide_scales = _pad(weight.scales, rows, Np, 0)
    wide = wide_zeros[g_idx]  # padding has the code that means 0
    wide[:K, :N] = codes if perm is None else codes[perm[:K]]
    return GPTQMarlinWeight(
        config=replace(config, zero_point=not symmetric),
        qweight=marlin.rows(bits).pack(wide),
        scales=marlin.scales(rows).apply(wide_scales),
        qzeros=None if symmetric else Stored().write(wide_zeros, marlin.zeros(bits)),
        g_idx=None if perm is None else g_idx.to(torch.int32),
        perm=None if perm is None else perm.to(torch.int32),
        layer=weight.layer,
    )


def to_gptq(weight: GPTQMarlinWeight) -> GPTQWeight:
    """The inverse of `from_gptq`, bit for bit, in the zero-point convention of what was repacked."""
    codes, origin = weight.codes(), weight.layer.origin
    scales = weight.plain_scales()[: codes.scales.shape[1], : weight.layer.N]
    config = origin if isinstance(origin, GPTQConfig) else None
    return from_codes(codes, scales, weight.layer, config, index=weight.config.index)


def of_checkpoint(weight: MarlinWeight) -> GPTQWeight:
    """A Marlin checkpoint's layer as GPTQ."""
    return from_codes(weight.codes(), weight.plain_scales(), weight.layer)


def to_checkpoint(weight: GPTQWeight, config: MarlinConfig) -> MarlinWeight:
    """A GPTQ weight as a Marlin checkpoint has it: symmetric, in order, in whole tiles."""
    bits = weight.config.bits
    reason = _why_no_checkpoint(weight, config)
    if reason:
        raise RepackError("gptq", "a Marlin checkpoint", reason)
    order = marlin.SCALES_PER_COLUMN if config.group_size == -1 else marlin.SCALES_GROUPED
    return MarlinWeight(
        config=config,
        B=marlin.rows(bits).pack(gptq.rows(bits).unpack(weight.qweight)),
        s=order.apply(weight.scales),
        layer=weight.layer,
    )


def _why_no_checkpoint(weight: GPTQWeight, config: MarlinConfig) -> str | None:
    N, K = weight.shape
    if K % marlin.TILE_K or N % marlin.TILE_N:
        return f"needs K, N in multiples of {marlin.TILE_K}, {marlin.TILE_N}; got {K}, {N}"
    if not in_order(weight) or K % config.rows_of_a_group(K):
        return "the groups are not in order along K, all of one size, and there is no g_idx"
    if not is_symmetric(weight):
        return f"a zero point is not {2 ** (weight.config.bits - 1)}, and none are stored"
    return None


def why_not(weight: GPTQWeight) -> str | None:
    """Why Marlin's kernel cannot read a weight, or None."""
    config = weight.config
    if config.bits not in marlin.BITS:
        return f"Marlin's kernel reads 4 or 8 bits, got {config.bits}"
    if weight.scales.shape[0] > 1 and config.group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES[1:]))
        return f"Marlin's kernel reads groups of {sizes} or one group, got {config.group_size}"
    highest = int(zero_points(weight).max())
    if highest >= 2**config.bits:
        return f"a zero point of {highest} does not fit {config.bits} bits"
    return None


def _rows(weight: GPTQWeight) -> tuple[GPTQMarlinConfig, Tensor | None, Tensor]:
    """The kernel's config, the permutation of the padded rows or None, and the group of each padded row."""
    (N, K), groups, size = weight.shape, weight.scales.shape[0], weight.config.group_size
    config = GPTQMarlinConfig(weight.config.bits, size if groups > 1 else -1, index=weight.g_idx.dtype)
    _, Kp = padded(N, K, config.group_size)
    device = weight.g_idx.device
    here, there = config.in_order(K, device), config.in_order(Kp, device)
    if in_order(weight):
        return config, None, there
    perm = torch.argsort(weight.g_idx, stable=True)
    ordered = weight.g_idx[perm].long()
    whole = weight.layer.whole[1] == weight.layer.K
    is_k_full = whole and config.groups(K) == groups and bool((ordered == here).all())
    rest = there[K:] if is_k_full else torch.full_like(there[K:], groups - 1)
    config = replace(config, act_order=True, is_k_full=is_k_full)
    return config, torch.cat([perm, torch.arange(K, Kp, device=device)]), torch.cat([ordered, rest])


def _pad(tensor: Tensor, rows: int, columns: int, value: int) -> Tensor:
    wide = tensor.new_full((rows, columns), value)
    wide[: tensor.shape[0], : tensor.shape[1]] = tensor
    return wide
