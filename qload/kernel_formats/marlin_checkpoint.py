"""Marlin checkpoints: symmetric codes, groups in order, no padding."""

from qload.formats import MarlinConfig, MarlinWeight
from qload.formats.marlin import SCALES
from qload.kernel_formats.plain_integers import Integers, Origin, from_ordered_groups
from qload.layouts import marlin


def to_integers(weight: MarlinWeight) -> Integers:
    """Convert to plain integers."""
    packing = marlin.rows(weight.config.bits)
    return from_ordered_groups(weight, lambda: packing.packed(weight.B), weight.plain_scales())


def from_integers(integers: Integers, origin: Origin | None = None) -> MarlinWeight:
    """Convert exactly, or raise RepackError.

    A Marlin checkpoint has whole tiles, groups in order and no zero points. `origin`: the checkpoint weight
    to restore; a share keeps its order of scales.
    """
    integers.reject("a Marlin checkpoint", _find_unsupported(integers))
    bits, groups, K = integers.bits, integers.groups, integers.layer.K
    config = origin.config if origin else MarlinConfig(-1 if groups == 1 else K // groups, bits)
    order = marlin.SCALES_PER_COLUMN if config.group_size == -1 else marlin.SCALES_GROUPED
    return MarlinWeight(
        config=config,
        B=integers.pack_codes("B", marlin.rows(bits), integers.unpack()),
        s=order.apply(integers.scales),
        layer=integers.layer,
    )


def _find_unsupported(integers: Integers) -> str | None:
    if integers.bits not in marlin.BITS:
        return f"a Marlin checkpoint has 4 or 8 bits, got {integers.bits}"
    return find_unsupported_by_tiles(integers, marlin.TILE_K, "a Marlin checkpoint")


def find_unsupported_by_tiles(integers: Integers, rows: int, layout: str) -> str | None:
    """Return the reason if tiles of `rows` rows, without index and zero points, cannot represent a weight."""
    (N, K), dtype = integers.shape, integers.scales.dtype
    if K % rows or N % marlin.TILE_N:
        return f"needs K, N in multiples of {rows}, {marlin.TILE_N}; got {K}, {N}"
    reason = integers.find_unordered_groups(layout)
    if reason:
        return reason
    if not integers.symmetric:
        return f"a zero point is not {2 ** (integers.bits - 1)}, and {layout} stores no zero points"
    if dtype not in SCALES:
        return f"needs scales in float16 or bfloat16, got {str(dtype).removeprefix('torch.')}"
    return None
