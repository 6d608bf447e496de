"""Our own kernel format: GPTQ and AWQ as the kernel for few tokens reads them fastest, and the way back.

    qweight  int32             (N/64, K*b*2)     codes in `layouts.strips`, rows in the order of perm
    scales   fp16, bf16, fp32  (G, N)            as for Marlin's kernel
    qzeros   int32             (G, N*b/32)       as for Marlin's kernel; absent: all are 2**(b-1)
    g_idx    int32             (K,)              the group of each row of qweight, sorted; absent: in order
    perm     int32             (K,)              row i of qweight is input perm[i]; absent: in order

K and N are padded as Marlin's are, K to 128 and N to 64. A share of an act order whose groups have rows
elsewhere is left to Marlin's order, which looks every row's group up.
"""

from dataclasses import dataclass
from math import lcm
from typing import ClassVar

from qload.kernel_formats import marlin
from qload.kernel_formats.marlin import GPTQMarlinConfig, GPTQMarlinWeight
from qload.kernel_formats.plain_integers import Integers
from qload.layouts import strips
from qload.layouts.packing import Packing
from qload.spec import TensorSpec

CAPABILITY = 90  # of the chips whose kernels read strips faster than Marlin's order


@dataclass(frozen=True)
class StripsConfig(GPTQMarlinConfig):
    """What is to be known of a weight in strips.

    The attributes are those of Marlin's order; groups are always whole.
    """

    name: ClassVar[str] = "strips"

    def declared(self) -> tuple[TensorSpec, ...]:
        """The declaration of every tensor of such a layer."""
        return StripsWeight.tensors(self)


@dataclass(frozen=True, eq=False, repr=False)
class StripsWeight(GPTQMarlinWeight):
    """A GPTQ or AWQ weight in strips of 64 columns, our own order for few tokens.

    K is padded to a multiple of 128 and N to one of 64. The attributes are those of Marlin's order, but for:

    Attributes
    ----------
    qweight
        Codes, rows in the order of perm (`qload.layouts.strips`): (N / 64, K * bits * 2), int32.
    """

    config: StripsConfig

    format: ClassVar[str] = "strips"
    allows_shares: ClassVar[bool] = False
    example: ClassVar[StripsConfig] = StripsConfig(4, 128, zero_point=True, act_order=True)

    @staticmethod
    def order(bits: int) -> Packing:
        """Where codes lie."""
        return strips.rows(bits)

    @staticmethod
    def axes(config: GPTQMarlinConfig) -> str:
        """Of the words."""
        never = "!" if config.act_order else ""
        return f"N/{strips.TILE_N} K@{strips.TILE_K}*{2 * config.bits}{never}"

    @staticmethod
    def padded(N: int, K: int, group_size: int) -> tuple[int, int]:
        """(N, K) with whole units and whole groups."""
        step = lcm(strips.TILE_K, max(group_size, 1))
        return -(-N // strips.TILE_N) * strips.TILE_N, -(-K // step) * step

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(N, K) with the padding."""
        return self.qweight.shape[0] * strips.TILE_N, self.qweight.shape[1] // (2 * self.config.bits)


def gains(capability: int | None) -> bool:
    """Whether kernels read strips faster than Marlin's order on a CUDA device of a compute capability."""
    return capability is not None and capability // 10 == CAPABILITY // 10


def write(integers: Integers, keep_zeros: bool = False) -> StripsWeight:
    """Codes in strips, scales and zero points in Marlin's orders; exact, or RepackError with the reason."""
    made = marlin.write(integers, keep_zeros, StripsWeight)
    assert isinstance(made, StripsWeight)
    return made
