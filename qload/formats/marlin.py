"""Marlin checkpoints, dense and 2:4 sparse: symmetric codes and permuted scales in the kernel's order."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredCodes, StoredSparse
from qload.errors import FieldValueError, check_values
from qload.layouts import marlin, marlin_24
from qload.spec import Role, TensorSpec, named

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


ROWS = 32  # of the dense weight, in one row of B_24
NIBBLE = 4
COMPRESSED = {"B_24": "weight_packed", "B_meta": "meta", "s": "scale_packed"}


@dataclass(frozen=True)
class Marlin24Config(spec.Grouped, spec.Config):
    """What a Marlin 2:4 checkpoint's config says of all its layers.

    Attributes
    ----------
    group_size
        Inputs that share a scale; -1: one scale a column, which stay in plain order.
    bits
        Of a code: 4 or 8.
    compressed
        Whether tensors have the names, and scales the rule, of compressed-tensors.
    plain
        Whether by that rule the scales of this layer's groups are in plain order.
    """

    name: ClassVar[str] = "marlin_24"

    group_size: int
    bits: int = 4
    compressed: bool = False
    plain: bool = False

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *marlin.BITS)
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> "Marlin24Config":
        """One group that covers all of K leaves the scales in plain order."""
        K = sum(headers.shapes["B_24"][:1]) * ROWS
        return replace(self.one_group(K), plain=self.compressed and K <= 2 * self.group_size < 2 * K)

    @property
    def permuted(self) -> bool:
        """Whether the scales are in the order for groups."""
        return self.group_size != -1 and not self.plain


@dataclass(frozen=True, eq=False, repr=False)
class Marlin24Weight(spec.Weight):
    """A layer of a Marlin 2:4 checkpoint, or a share of one; FieldValueError for metadata that means nothing.

    w[n, k] = s[k / g, n] * (code[k, n] - 2**(bits - 1)) where row k of column n is kept, else 0. Source: vLLM
    and compressed-tensors, to which it is bit-equal.

    Attributes
    ----------
    B_24
        Kept codes (K / 2, N) as Marlin's kernel reads them (`qload.layouts.marlin_24`): (K / 32, N * bits /
        2), int32.
    B_meta
        The places of the kept codes, as sparse tensor cores load them: (K / 32, 2 * N), int16.
    s
        Scales, permuted where there are groups: (K / g, N), fp16 or bf16.
    """

    config: Marlin24Config
    B_24: Tensor
    B_meta: Tensor
    s: Tensor

    format: ClassVar[str] = "marlin_24"
    example: ClassVar[Marlin24Config] = Marlin24Config(group_size=128)

    @classmethod
    def tensors(cls, config: Marlin24Config) -> tuple[TensorSpec, ...]:
        """Tiles of 32 dense rows and 64 columns; groups bind K too."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        specs = (
            TensorSpec("B_24", (torch.int32,), f"K/32 N@64*{config.bits // 2}", Role.WORD),
            TensorSpec("B_meta", (torch.int16,), "K/32 N@64*2", Role.WORD, nibbles=marlin_24.PAIRS),
            TensorSpec("s", SCALES, f"{groups} N@64", Role.SCALE),
        )
        order = -1 if config.compressed else 1
        return tuple(replace(one, stored=(one.name, COMPRESSED[one.name])[::order]) for one in specs)

    def plain_scales(self) -> Tensor:
        """The scales (G, N) in plain order, in their own dtype."""
        return marlin_24.SCALES_GROUPED.undo(self.s) if self.config.permuted else self.s

    def __post_init__(self) -> None:
        super().__post_init__()
        name = named(self.layer.name or type(self).__name__, "B_meta")
        check_values(name, self.B_meta)
        wrong = marlin_24.find_invalid_fields(self.B_meta)
        if wrong:
            place, count, total = wrong
            raise FieldValueError(
                name,
                "metadata that keeps no two places of four, in order",
                "one of " + ", ".join(map(str, marlin_24.PAIRS)),
                f"{place} ({count} of {total} fields)",
            )

    def positions(self) -> Tensor:
        """The row, 0 to 3 of its four, of each kept code: (K / 2, N)."""
        return marlin_24.read_positions(self.B_meta)

    def stored(self) -> StoredSparse | None:
        """As it lies, of four bits."""
        if self.config.bits != NIBBLE:
            return None
        return StoredSparse(
            codes=marlin_24.rows(NIBBLE).packed(self.B_24).T,
            places=lambda: marlin_24.METADATA.undo(self.B_meta).T,
            scales=self.plain_scales().T,
            run=min(self.config.rows_of_a_group(self.layer.K), max(self.layer.K, 1)),
        )

    def codes(self) -> spec.Codes:
        """Codes and scales in plain order; a row that is not kept has the code that means 0."""
        bits, groups = self.config.bits, self.config.in_order(self.layer.K, self.B_24.device)
        kept = marlin_24.rows(bits).unpack(self.B_24)
        dense = marlin_24.scatter(kept, self.positions(), 2 ** (bits - 1))
        return spec.symmetric(bits, dense, self.plain_scales(), groups)
