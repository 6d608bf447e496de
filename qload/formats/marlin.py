"""Marlin checkpoints: symmetric codes as Marlin's kernel reads them, scales permuted along.

On disk, for a layer of K inputs and N outputs, group size g, b bits:

    B  int32       (K/16, N*b/2)  codes in `layouts.marlin`, tiles of 16 rows and 64 columns
    s  fp16, bf16  (K/g, N)       scales, in the order for groups, or for one scale a column

    w[n, k] = s[k / g, n] * (code[k, n] - 2**(b-1))

The order of the scales belongs to the whole layer: a row share left with one group keeps the order for
groups. Source: IST's packer 2f6d7c1, bit-equal to it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredCodes
from qload.layouts import marlin
from qload.spec import Role, TensorSpec

SCALES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class MarlinConfig(spec.Grouped, spec.Config):
    """What a Marlin checkpoint's config says of all its layers.

    Attributes
    ----------
    group_size
        Inputs that share a scale; -1: one scale a column, and the order of scales that goes with it.
    bits
        Of a code: 4 or 8.
    """

    name: ClassVar[str] = "marlin"

    group_size: int
    bits: int = 4

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *marlin.BITS)
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> "MarlinConfig":
        """One group that covers all of K has the order of one scale a column."""
        return self.one_group(sum(headers.shapes["B"][:1]) * marlin.TILE_K)


@dataclass(frozen=True, eq=False, repr=False)
class MarlinWeight(spec.Weight):
    """A layer of a Marlin checkpoint, or a share of one.

    w[n, k] = s[k / g, n] * (code[k, n] - 2**(bits - 1)), groups of g inputs. Source: IST's packer, to which
    it is bit-equal.

    Attributes
    ----------
    B
        Codes as Marlin's kernel reads them (`qload.layouts.marlin`), in tiles of 16 rows and 64 columns:
        (K / 16, N * bits / 2), int32.
    s
        Scales, in the order for groups, or for one scale a column: (K / g, N), fp16 or bf16.
    """

    config: MarlinConfig
    B: Tensor
    s: Tensor

    format: ClassVar[str] = "marlin"
    example: ClassVar[MarlinConfig] = MarlinConfig(group_size=128)

    @classmethod
    def tensors(cls, config: MarlinConfig) -> tuple[TensorSpec, ...]:
        """Tiles bind both dimensions, groups bind K too."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        return (
            TensorSpec("B", (torch.int32,), f"K/16 N@64*{config.bits // 2}", Role.WORD),
            TensorSpec("s", SCALES, f"{groups} N@64", Role.SCALE),
        )

    def plain_scales(self) -> Tensor:
        """The scales (G, N) in plain order, in their own dtype."""
        per_column = self.config.group_size == -1
        return (marlin.SCALES_PER_COLUMN if per_column else marlin.SCALES_GROUPED).undo(self.s)

    def stored(self) -> StoredCodes:
        """As it lies."""
        per_column = self.config.group_size == -1
        return StoredCodes(
            codes=marlin.rows(self.config.bits).packed(self.B).T,
            scales=self.s.T,
            zeros=None,
            zero_rule=None,
            run=self.config.rows_of_a_group(self.layer.K),
            scale_order=marlin.SCALES_PER_COLUMN if per_column else marlin.SCALES_GROUPED,
        )

    def codes(self) -> spec.Codes:
        """Codes and scales in plain order; every zero point is 2**(bits - 1)."""
        bits, groups = self.config.bits, self.config.in_order(self.layer.K, self.B.device)
        return spec.symmetric(bits, marlin.rows(bits).packed(self.B), self.plain_scales(), groups)
