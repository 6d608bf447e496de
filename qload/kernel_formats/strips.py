"""GPTQ and AWQ in strips, qload's order for its CUDA kernels for few tokens.

    qweight  int32             (N/64, K*b*2)     codes in `layouts.strips`, rows in the order of perm
    scales   fp16, bf16, fp32  (G, N)            in Marlin's order
    qzeros   int32             (G, N*b/32)       in Marlin's order; absent: all are 2**(b-1)
    g_idx    int32             (K,)              group of each row of qweight, sorted; absent: in order
    perm     int32             (K,)              row i of qweight is input perm[i]; absent: no permutation

Codes of 2 and 3 bits are stored with 4: half a byte each. 8 - 2**(bits - 1) is added to codes and zero
points, so that symmetric weights stay without zero points.

K is padded to 128 and whole groups, N to 64, with weights of 0 as in Marlin's order. A row share in act order
with incomplete groups is refused: the kernels compute the group of a row from its number. Marlin's kernel
looks it up.
"""

from dataclasses import dataclass
from math import lcm
from typing import ClassVar

import torch
from torch import Tensor

from qload.kernel_formats import marlin
from qload.kernel_formats.marlin import GPTQMarlinConfig, GPTQMarlinWeight
from qload.layouts import strips
from qload.layouts.packing import Packing
from qload.spec import TensorSpec
from qload.spec.integers import Integers, pad_matrix, with_bits

BYTES = Packing(8, "n (k r) -> n k (r)", r=4)  # rows of bytes
CODE_BITS = (2, 3, 4, 8)  # of the checkpoint
WIDTH = 4  # bits of codes that have fewer in the checkpoint
CAPABILITY = 80  # compute capability of Ampere, times 10


@dataclass(frozen=True)
class StripsConfig(GPTQMarlinConfig):
    """Config of a weight in strips.

    The attributes are those of `GPTQMarlinConfig`; `is_k_full` is always True.
    """

    name: ClassVar[str] = "strips"

    def declared(self) -> tuple[TensorSpec, ...]:
        """Declare the tensors of a layer with this config."""
        return StripsWeight.tensors(self)


@dataclass(frozen=True, eq=False, repr=False)
class StripsWeight(GPTQMarlinWeight):
    """A GPTQ or AWQ weight in strips of 64 columns, qload's order for few tokens.

    K is padded to a multiple of 128 and N to one of 64. The other attributes are those of `GPTQMarlinWeight`.

    Attributes
    ----------
    qweight
        Codes, rows in the order of perm (`qload.layouts.strips`): (N / 64, K * bits * 2), int32.
    """

    config: StripsConfig

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
    bits = max(integers.bits, WIDTH)
    weight = marlin.from_integers(with_bits(integers, bits), keep_zeros, StripsWeight)
    assert isinstance(weight, StripsWeight)
    return weight


def to_integers(weight: StripsWeight) -> Integers:
    """Convert to plain integers with the bits of the checkpoint, in the order of inputs."""
    integers = marlin.to_integers(weight)
    return with_bits(integers, getattr(integers.origin.config, "bits", integers.bits))
