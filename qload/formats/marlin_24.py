"""Marlin checkpoints with 2:4 sparsity: symmetric codes of the kept rows, and their positions.

On disk, for a layer of K inputs and N outputs, group size g, b bits, two of every four rows kept:

    B_24    int32       (K/32, N*b/2)  kept codes (K/2, N) in `layouts.marlin_24`
    B_meta  int16       (K/32, 2*N)    positions of the kept codes, in the load order of sparse tensor cores
    s       fp16, bf16  (K/g, N)       scales, permuted if there are groups

    w[n, k] = s[k / g, n] * (code[k, n] - 2**(b-1)) for a kept row k of column n, else 0

compressed-tensors (marlin-24) calls them `weight_packed`, `meta` and `scale_packed`, and permutes the scales
only of groups smaller than half of K. An invalid field of B_meta is refused by the rank of its share:
metadata is half as large as 4-bit codes, too much for every rank to read whole. `qload verify` reads all of
it. Source: vLLM 0.11.0 and compressed-tensors 0.14.0, bit-equal to both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from qload import devices, dtypes, spec
from qload.devices import StoredSparse
from qload.errors import FieldValueError, PatternError, RepackError, check_values
from qload.layouts import marlin, marlin_24
from qload.lazy_torch import Tensor
from qload.spec import Role, TensorSpec, named
from qload.spec.integers import Integers, IntegerWeight, Origin, from_ordered_groups

SCALES = (dtypes.float16, dtypes.bfloat16)
DENSE_ROWS = 32  # in one row of B_24
KERNEL_BITS = 4
COMPRESSED = {"B_24": "weight_packed", "B_meta": "meta", "s": "scale_packed"}


@dataclass(frozen=True)
class Marlin24Config(spec.Grouped, spec.Config):
    """Config of all Marlin 2:4 layers of a checkpoint.

    Attributes
    ----------
    group_size
        Inputs that share a scale; -1: one scale per column, in plain order.
    bits
        Bits of a code: 4 or 8.
    compressed
        Whether tensors have the names, and scales the rule, of compressed-tensors.
    plain
        Whether that rule puts the scales of this layer in plain order.
    """

    name: ClassVar[str] = "marlin_24"

    group_size: int
    bits: int = 4
    compressed: bool = False
    plain: bool = False

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *marlin.BITS)
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> Marlin24Config:
        """Normalize one group for all of K to plain order of scales."""
        K = sum(headers.shapes["B_24"][:1]) * DENSE_ROWS
        return replace(self.one_group(K), plain=self.compressed and K <= 2 * self.group_size < 2 * K)

    @property
    def permuted(self) -> bool:
        """True if the scales are in the order for groups."""
        return self.group_size != -1 and not self.plain


@dataclass(frozen=True, eq=False, repr=False)
class Marlin24Weight(IntegerWeight):
    """A layer of a Marlin 2:4 checkpoint, or a share of one; FieldValueError for invalid metadata.

    w[n, k] = s[k / g, n] * (code[k, n] - 2**(bits - 1)) for a kept row k of column n, else 0. Source: vLLM
    and compressed-tensors, bit-equal to their files.

    Attributes
    ----------
    B_24
        Kept codes (K / 2, N) in Marlin's order (`qload.layouts.marlin_24`): (K / 32, N * bits /
        2), int32.
    B_meta
        Positions of the kept codes, in the load order of sparse tensor cores: (K / 32, 2 * N), int16.
    s
        Scales, permuted if there are groups: (K / g, N), fp16 or bf16.
    """

    config: Marlin24Config
    B_24: Tensor
    B_meta: Tensor
    s: Tensor

    format: ClassVar[str] = "marlin_24"
    example: ClassVar[Marlin24Config] = Marlin24Config(group_size=128)

    @classmethod
    def tensors(cls, config: Marlin24Config) -> tuple[TensorSpec, ...]:
        """Declare tiles of 32 dense rows and 64 columns; groups bind K too."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        specs = (
            TensorSpec("B_24", (dtypes.int32,), f"K/32 N@64*{config.bits // 2}", Role.WORD),
            TensorSpec("B_meta", (dtypes.int16,), "K/32 N@64*2", Role.WORD, nibbles=marlin_24.PAIRS),
            TensorSpec("s", SCALES, f"{groups} N@64", Role.SCALE),
        )
        order = -1 if config.compressed else 1
        return tuple(
            replace(tensor, stored=(tensor.name, COMPRESSED[tensor.name])[::order]) for tensor in specs
        )

    def plain_scales(self) -> Tensor:
        """Scales (G, N) in plain order, in their own dtype."""
        return marlin_24.SCALES_GROUPED.undo(self.s) if self.config.permuted else self.s

    def __post_init__(self) -> None:
        super().__post_init__()
        name = named(self.layer.name or type(self).__name__, "B_meta")
        check_values(name, self.B_meta)
        wrong = marlin_24.find_invalid_fields(self.B_meta)
        if wrong:
            field, count, total = wrong
            raise FieldValueError(
                name,
                "metadata without two positions of four, in order",
                "one of " + ", ".join(map(str, marlin_24.PAIRS)),
                f"{field} ({count} of {total} fields)",
            )

    def positions(self) -> Tensor:
        """Row within its quad, 0 to 3, of each kept code: (K / 2, N)."""
        return marlin_24.read_positions(self.B_meta)

    def stored(self) -> StoredSparse | None:
        """Describe the stored order for kernels; None for other bits than 4."""
        if self.config.bits != KERNEL_BITS:
            return None
        return StoredSparse(
            codes=marlin_24.rows(KERNEL_BITS).packed(self.B_24).T,
            places=lambda: marlin_24.METADATA.undo(self.B_meta).T,
            scales=self.plain_scales().T,
            run=min(self.config.rows_of_a_group(self.layer.K), max(self.layer.K, 1)),
        )

    def codes(self) -> spec.Codes:
        """Return codes and scales in plain order; dropped rows have the code of 0."""
        bits, groups = self.config.bits, self.config.in_order(self.layer.K, self.B_24.device)
        kept = marlin_24.rows(bits).unpack(self.B_24)
        dense = marlin_24.scatter(kept, self.positions(), 2 ** (bits - 1))
        return spec.symmetric(bits, dense, self.plain_scales(), groups)

    def to_integers(self) -> Integers:
        """Convert to dense plain integers.

        RepackError if the metadata keeps other codes of weight 0 than packers do: dense codes lose this
        choice.
        """
        codes = self.codes().plain().T
        expected = marlin_24.choose_positions(2 ** (self.config.bits - 1) != codes)
        differing = (expected != self.positions()).nonzero()
        if differing.numel():
            row, n = differing[0].tolist()
            difference = "the metadata keeps another code of weight 0 than packers do"
            reason = f"{difference}, first at kept row {row} of column {n}"
            raise RepackError("marlin_24", "dense layouts", reason)
        return from_ordered_groups(self, lambda: codes, self.plain_scales())

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert 2:4 sparse `integers` exactly, or raise RepackError.

        `origin`: the checkpoint weight to restore; a share keeps its order of scales.
        """
        integers.reject("marlin_24", _find_conflict(integers))
        if integers.whole is not None:
            _choose_positions(integers.whole)  # every rank then raises the same error
        bits, codes, positions = integers.bits, devices.plain(integers.unpack()), _choose_positions(integers)
        size = integers.group_size if integers.groups > 1 else -1
        config = origin.config if origin else Marlin24Config(size, bits)
        scales = marlin_24.SCALES_GROUPED.apply(integers.scales) if config.permuted else integers.scales
        return cls(
            config=config,
            B_24=marlin_24.rows(bits).pack(marlin_24.gather(codes, positions)),
            B_meta=marlin_24.write_positions(positions),
            s=scales.contiguous(),
            layer=integers.layer,
        )


def _choose_positions(integers: Integers) -> Tensor:
    try:
        return marlin_24.choose_positions(devices.plain(integers.unpack()) != 2 ** (integers.bits - 1))
    except PatternError as error:
        raise RepackError(integers.source, "marlin_24", error.detail) from error


def _find_conflict(integers: Integers) -> str | None:
    if integers.bits not in marlin.BITS:
        return f"needs 4 or 8 bits, got {integers.bits}"
    return integers.find_tile_conflict("marlin_24", DENSE_ROWS, marlin.TILE_N, SCALES)


FORMATS = (Marlin24Weight,)
METHODS = ()  # read by detect.methods
