"""Marlin checkpoints: symmetric codes, groups in order, no padding."""

from qload.errors import RepackError
from qload.formats import MarlinConfig, MarlinWeight
from qload.formats.marlin import SCALES
from qload.kernel_formats.plain_integers import Integers, record_origin, symmetric_zero_points
from qload.layouts import marlin


def to_integers(weight: MarlinWeight) -> Integers:
    """Convert to plain integers."""
    bits, scales = weight.config.bits, weight.plain_scales()
    return Integers(
        bits=bits,
        group_size=weight.config.group_size,
        unpack=lambda: marlin.rows(bits).packed(weight.B),
        scales=scales,
        zeros=symmetric_zero_points(bits, scales),
        g_idx=weight.config.in_order(weight.layer.K, scales.device),
        layer=record_origin(weight),
    )


def from_integers(integers: Integers, config: MarlinConfig | None = None) -> MarlinWeight:
    """Convert exactly, or raise RepackError.

    A Marlin checkpoint has whole tiles, groups in order and no zero points. `config`: that of the original
    checkpoint, whose order of scales a share keeps.
    """
    reason = _find_unsupported(integers)
    if reason:
        raise RepackError(integers.source, "a Marlin checkpoint", reason)
    bits, groups, K = integers.bits, integers.groups, integers.layer.K
    config = config or MarlinConfig(-1 if groups == 1 else K // groups, bits)
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
