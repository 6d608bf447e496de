"""Marlin checkpoints: symmetric codes and permuted scales in the order of Marlin's kernel.

On disk, for a layer of K inputs and N outputs, group size g, b bits:

    B  int32       (K/16, N*b/2)  codes in `layouts.marlin`, tiles of 16 rows and 64 columns
    s  fp16, bf16  (K/g, N)       scales, in the order for groups, or for one scale per column

    w[n, k] = s[k / g, n] * (code[k, n] - 2**(b-1))

The whole layer decides the order of the scales: a row share with a single group keeps the order for groups.
Source: IST's packer 2f6d7c1, bit-equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from qload import dtypes, spec
from qload.devices import StoredCodes
from qload.layouts import marlin
from qload.lazy_torch import Tensor
from qload.spec import Role, TensorSpec
from qload.spec.integers import Integers, IntegerWeight, Origin, from_ordered_groups

SCALES = (dtypes.float16, dtypes.bfloat16)


@dataclass(frozen=True)
class MarlinConfig(spec.Grouped, spec.Config):
    """Config of all Marlin layers of a checkpoint.

    Attributes
    ----------
    group_size
        Inputs that share a scale; -1: one scale per column, in its own order.
    bits
        Bits of a code: 4 or 8.
    """

    name: ClassVar[str] = "marlin"

    group_size: int
    bits: int = 4

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *marlin.BITS)
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> MarlinConfig:
        """Normalize one group for all of K to one scale per column."""
        return self.one_group(sum(headers.shapes["B"][:1]) * marlin.TILE_K)


@dataclass(frozen=True, eq=False, repr=False)
class MarlinWeight(IntegerWeight):
    """A layer of a Marlin checkpoint, or a share of one.

    w[n, k] = s[k / g, n] * (code[k, n] - 2**(bits - 1)), groups of g inputs. Source: IST's packer,
    bit-equal to its files.

    Attributes
    ----------
    B
        Codes in Marlin's order (`qload.layouts.marlin`), in tiles of 16 rows and 64 columns:
        (K / 16, N * bits / 2), int32.
    s
        Scales, in the order for groups, or for one scale per column: (K / g, N), fp16 or bf16.
    """

    config: MarlinConfig
    B: Tensor
    s: Tensor

    format: ClassVar[str] = "marlin"
    codes_field: ClassVar[str] = "B"
    example: ClassVar[MarlinConfig] = MarlinConfig(group_size=128)

    @classmethod
    def tensors(cls, config: MarlinConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; tiles bind both dimensions, groups bind K too."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        return (
            TensorSpec("B", (dtypes.int32,), f"K/16 N@64*{config.bits // 2}", Role.WORD),
            TensorSpec("s", SCALES, f"{groups} N@64", Role.SCALE),
        )

    def plain_scales(self) -> Tensor:
        """Scales (G, N) in plain order, in their own dtype."""
        per_column = self.config.group_size == -1
        return (marlin.SCALES_PER_COLUMN if per_column else marlin.SCALES_GROUPED).undo(self.s)

    def stored(self) -> StoredCodes:
        """Describe the stored order for kernels."""
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
        """Return codes and scales in plain order, with zero points of 2**(bits - 1)."""
        bits, groups = self.config.bits, self.config.in_order(self.layer.K, self.B.device)
        return spec.symmetric(bits, marlin.rows(bits).packed(self.B), self.plain_scales(), groups)

    def to_integers(self) -> Integers:
        """Convert to plain integers."""
        packing = marlin.rows(self.config.bits)
        return from_ordered_groups(self, lambda: packing.packed(self.B), self.plain_scales())

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert `integers` exactly, or raise RepackError.

        A Marlin checkpoint has whole tiles, groups in order and no zero points. `origin`: the checkpoint
        weight to restore; a share keeps its order of scales.
        """
        integers.reject("a Marlin checkpoint", _find_conflict(integers))
        bits, groups, K = integers.bits, integers.groups, integers.layer.K
        config = origin.config if origin else MarlinConfig(-1 if groups == 1 else K // groups, bits)
        order = marlin.SCALES_PER_COLUMN if config.group_size == -1 else marlin.SCALES_GROUPED
        return cls(
            config=config,
            B=integers.pack_codes("B", marlin.rows(bits), integers.unpack()),
            s=order.apply(integers.scales),
            layer=integers.layer,
        )


def _find_conflict(integers: Integers) -> str | None:
    if integers.bits not in marlin.BITS:
        return f"a Marlin checkpoint has 4 or 8 bits, got {integers.bits}"
    return integers.find_tile_conflict("a Marlin checkpoint", marlin.TILE_K, marlin.TILE_N, SCALES)


FORMATS = (MarlinWeight,)
METHODS = ()  # read by detect.methods
