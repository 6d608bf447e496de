"""Our own kernel format for CPUs: GPTQ, AWQ and the like as the CPU module multiplies them, and the way back.

    qweight  int32             (N/16, K*s/2)   codes in `layouts.panels` of s bits, rows in the order of perm
    scales   fp16, bf16, fp32  (N/16, G*16)    16 columns of every group, then the next 16
    zeros    uint8             (N/16, G*16)    zero points alike; absent: all are 2**(b-1)
    perm     int32             (K,)            row i of qweight is input perm[i]; absent: in order

Codes of 8 bits have s = 8, all others 4. Those of 2 and 3 bits lie beside their zero points, which are always
there, as the middle of 4 bits is another. N is padded to whole panels, and the rows of each group to whole
words: of 4 bits to a multiple of 8, so that a group of 20 inputs takes 24 rows. Padding means 0. A share of
an act order whose groups have rows elsewhere is refused, as groups are told by their size alone.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import devices, spec
from qload.errors import ArgumentError, RepackError
from qload.formats import GPTQConfig
from qload.formats.gptq import SCALES
from qload.kernel_formats.plain_integers import Integers, Origin, with_origin
from qload.layouts import ClippedCodes, Order, Stored, panels
from qload.sentences import WORD_BITS
from qload.spec import Role, TensorSpec

MOST_ZERO = 255  # that a byte holds
CODE_BITS = (2, 3, *panels.BITS)  # that panels hold


def is_widened(bits: int) -> bool:
    """Whether codes of so many bits are stored with more."""
    return bits not in panels.BITS


@dataclass(frozen=True)
class PanelsConfig(spec.Grouped, spec.Config):
    """What is to be known of a weight in panels.

    Attributes
    ----------
    bits
        Of a code: 2, 3, 4 or 8.
    group_size
        Inputs that share a scale; -1: one scale a column.
    zero_point
        Whether zero points are stored, as those of 2 and 3 bits always are.
    act_order
        Whether rows are permuted.

    Raises
    ------
    ArgumentError
        For other bits, for 2 or 3 without zero points, and for a group size below 1 that is not -1.
    """

    name: ClassVar[str] = "panels"

    bits: int
    group_size: int
    zero_point: bool = False
    act_order: bool = False

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *CODE_BITS)
        self.check_group_size()
        if self.is_widened and not self.zero_point:
            raise ArgumentError("zero_point", f"True for {self.bits} bits, which are stored as 4", "False")

    @property
    def is_widened(self) -> bool:
        """Whether codes are stored with more bits than they have."""
        return is_widened(self.bits)

    @property
    def stored_bits(self) -> int:
        """Of a code as it is stored: 4 or 8."""
        return panels.BITS[0] if self.is_widened else self.bits

    @property
    def word_rows(self) -> int:
        """Rows of a word."""
        return WORD_BITS // self.stored_bits

    def run(self, K: int) -> int:
        """Rows that a group takes among `K` inputs, padded to whole words."""
        return -(-self.rows_of_a_group(K) // self.word_rows) * self.word_rows

    def places(self, K: int, device: torch.device | None = None) -> Tensor:
        """The row of each of `K` inputs, in the order of perm, int64 (`K`,) on `device`."""
        place = torch.arange(K, device=device)
        size = self.rows_of_a_group(K)
        return place // size * self.run(K) + place % size


@dataclass(frozen=True, eq=False, repr=False)
class PanelsWeight(spec.Weight):
    """A GPTQ or AWQ weight in panels of 16 columns, our own order for CPUs.

    N is padded to a multiple of 16, the rows of each group to whole words.

    Attributes
    ----------
    qweight
        Codes, rows in the order of perm (`qload.layouts.panels`): (N / 16, K * bits / 2), int32.
    scales
        Of a panel, group after group: (N / 16, G * 16), fp16, bf16 or fp32.
    zeros
        Zero points in the same order: (N / 16, G * 16), uint8; None: all are 2**(bits - 1).
    perm
        Row i of qweight, padding left out, is input perm[i]: (K,), int32; None: in order.
    """

    config: PanelsConfig
    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    perm: Tensor | None = None

    format: ClassVar[str] = "panels"
    example: ClassVar[PanelsConfig] = PanelsConfig(4, 128, zero_point=True, act_order=True)

    @classmethod
    def tensors(cls, config: PanelsConfig) -> tuple[TensorSpec, ...]:
        """Of the padded K and N. Rows of an act order are permuted, so that K is never cut."""
        never, size, outputs = "!" if config.act_order else "", config.group_size, f"N/{panels.TILE_N}"
        words, groups = f"K@{config.word_rows}*{config.stored_bits // 2}", f"{panels.TILE_N}"
        if size != -1:
            words = f"K@{size}*{config.run(size) * config.stored_bits // 2}/{size}"
            groups = f"K@{size}/{size}*{panels.TILE_N}{never}"
        specs = [
            TensorSpec("qweight", (torch.int32,), f"{outputs} {words}{never}", Role.WORD),
            TensorSpec("scales", SCALES, f"{outputs} {groups}", Role.SCALE),
        ]
        if config.zero_point:
            specs.append(TensorSpec("zeros", (torch.uint8,), f"{outputs} {groups}", Role.WORD))
        if config.act_order:
            specs.append(TensorSpec("perm", (torch.int32,), "K!", Role.INDEX, fact=True, permutation=True))
        return tuple(specs)

    @property
    def rows(self) -> int:
        """Of a panel, padding included."""
        return self.qweight.shape[1] * 2 // self.config.stored_bits

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(N, K) with the padding."""
        return self.qweight.shape[0] * panels.TILE_N, self.rows

    def codes(self) -> spec.Codes:
        """Codes with every row back at its input, without the padding."""
        (N, K), bits = self.shape, self.config.bits
        packed, place = panels.rows(self.config.stored_bits).packed(self.qweight), self._place_of_inputs()
        codes: Tensor | devices.LazyCodes
        if packed.shape == (K, N):
            codes = packed if place is None else packed[place]
        else:
            codes = ClippedCodes(packed, (K, N)) if place is None else packed.plain()[place, :N]
        k_group = self.config.in_order(K, self.qweight.device)
        if self.perm is not None:
            k_group = torch.empty_like(k_group).index_copy_(0, self.perm.long(), k_group)
        plain = spec.symmetric(bits, codes, _undone(self.scales)[:, :N], k_group)
        return plain if self.zeros is None else replace(plain, zeros=_undone(self.zeros)[:, :N].int().T)

    def _place_of_inputs(self) -> Tensor | None:
        """The row of each input; None: as they count."""
        K, config = self.layer.K, self.config
        if self.perm is None and (config.group_size == -1 or config.run(K) == config.group_size):
            return None
        place = config.places(K, self.qweight.device)
        if self.perm is None:
            return place
        return torch.empty_like(place).index_copy_(0, self.perm.long(), place)


def read(weight: PanelsWeight) -> Integers:
    """Every row back at its input, without the padding."""
    codes = weight.codes()
    assert codes.k_group is not None
    assert codes.zeros is not None
    layer = with_origin(weight, weight.perm, keeps_zeros=weight.config.zero_point)
    origin = layer.origin.config if isinstance(layer.origin, Origin) else None
    return Integers(
        bits=weight.config.bits,
        group_size=weight.config.group_size,
        unpack=lambda: codes.codes.T,
        scales=_undone(weight.scales)[:, : weight.layer.N],
        zeros=codes.zeros.T,
        g_idx=codes.k_group,
        layer=layer,
        convention=origin.zeros if isinstance(origin, GPTQConfig) else Stored(),
    )


def write(integers: Integers, keep_zeros: bool = False) -> PanelsWeight:
    """Codes, scales and zero points in panels, padded; exact, or RepackError with the reason.

    `keep_zeros`: zero points stay although all are 2**(bits - 1) and could be left out.
    """
    reason = why_not(integers)
    perm = None if reason or integers.in_order else torch.argsort(integers.g_idx, stable=True)
    if perm is not None:
        reason = _why_not_permuted(integers, perm)
    if reason:
        raise RepackError(integers.source, "panels", reason)
    symmetric = not (keep_zeros or is_widened(integers.bits)) and integers.symmetric
    size = integers.group_size if integers.groups > 1 else -1
    config = PanelsConfig(integers.bits, size, zero_point=not symmetric, act_order=perm is not None)
    tensors = {
        "qweight": integers.packed("qweight", panels.rows(config.stored_bits), _wide(integers, config, perm)),
        "scales": integers.ordered("scales", panels.SCALES, _columns(integers.scales)),
        "zeros": None if symmetric else _zeros(integers),
        "perm": None if perm is None else perm.to(torch.int32),
    }
    return PanelsWeight.unchecked(config, integers.layer, tensors)


def why_not(integers: Integers) -> str | None:
    """Why panels cannot hold a weight, or None; the same on every rank."""
    least, most = integers.span
    if least < 0 or most > MOST_ZERO:
        return f"a zero point of {least if least < 0 else most} does not fit a byte"
    return None


def refusal(integers: Integers) -> str | None:
    """Why `write` refuses a weight, or None; codes are not read."""
    if integers.bits not in CODE_BITS:
        return f"codes of {integers.bits} bits"
    reason = why_not(integers)
    if reason or integers.in_order:
        return reason
    return _why_not_permuted(integers, torch.argsort(integers.g_idx, stable=True))


def _why_not_permuted(integers: Integers, perm: Tensor) -> str | None:
    """Why groups cannot be told by their size once rows are in the order of `perm`, or None."""
    size, K = integers.group_size, integers.layer.K
    here = torch.arange(K, device=perm.device) // size
    if -(-K // size) == integers.groups and bool((integers.g_idx[perm].long() == here).all()):
        return None
    if integers.layer.whole[1] == K:
        return "its groups are not of one size (act order)"
    return "rows of its groups are on other ranks (act order)"


def _wide(integers: Integers, config: PanelsConfig, perm: Tensor | None) -> Tensor | devices.LazyCodes:
    """The codes (rows, columns) in the order of `perm`, with the padding."""
    (N, K), codes = integers.shape, integers.unpack()
    inner = codes if perm is None else codes[perm]
    rows, columns = config.groups(K) * config.run(K), _up(N)
    if (rows, columns) == (K, N):
        return inner
    plain = devices.plain(inner)
    wide = plain.new_zeros(rows, columns)
    wide[config.places(K, plain.device), :N] = plain
    return wide


def _zeros(integers: Integers) -> Tensor:
    return panels.SCALES.apply(_columns(integers.zeros.to(torch.uint8)))


def _columns(tensor: Tensor) -> Tensor:
    """(G, N) with columns of zeros up to whole panels."""
    N = tensor.shape[1]
    if _up(N) == N:
        return tensor
    wide = tensor.new_zeros(tensor.shape[0], _up(N))
    wide[:, :N] = tensor
    return wide


def _undone(tensor: Tensor) -> Tensor:
    """(G, N) of what lies in panels."""
    order: Order = panels.SCALES
    return order.undo(tensor)


def _up(N: int) -> int:
    return -(-N // panels.TILE_N) * panels.TILE_N
