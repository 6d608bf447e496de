"""Marlin checkpoints from integers of any source: symmetric, groups in order, nothing padded."""

from qload.errors import RepackError
from qload.formats import MarlinConfig, MarlinWeight
from qload.formats.marlin import SCALES
from qload.kernel_formats.plain_integers import Integers
from qload.layouts import marlin


def write(integers: Integers) -> MarlinWeight:
    """Exact, or RepackError: only what tiles hold whole, of one scale a group and no zero points."""
    reason = _why_not(integers)
    if reason:
        raise RepackError(integers.source, "a Marlin checkpoint", reason)
    bits, groups, K = integers.bits, integers.groups, integers.layer.K
    return MarlinWeight(
        config=MarlinConfig(-1 if groups == 1 else K // groups, bits),
        B=integers.packed("B", marlin.rows(bits), integers.unpack()),
        s=(marlin.SCALES_PER_COLUMN if groups == 1 else marlin.SCALES_GROUPED).apply(integers.scales),
        layer=integers.layer,
    )


def _why_not(integers: Integers) -> str | None:
    if integers.bits not in marlin.BITS:
        return f"a Marlin checkpoint has 4 or 8 bits, got {integers.bits}"
    return why_not_in_tiles(integers, marlin.TILE_K, "a Marlin checkpoint")


def why_not_in_tiles(integers: Integers, rows: int, layout: str) -> str | None:
    """Why tiles of so many `rows`, with one scale a group and nothing else, cannot hold integers, or None."""
    (N, K), dtype = integers.shape, integers.scales.dtype
    if K % rows or N % marlin.TILE_N:
        return f"needs K, N in multiples of {rows}, {marlin.TILE_N}; got {K}, {N}"
    reason = integers.why_no_index(layout)
    if reason:
        return reason
    if not integers.symmetric:
        return f"a zero point is not {2 ** (integers.bits - 1)}, and {layout} stores no zero points"
    if dtype not in SCALES:
        return f"needs scales in float16 or bfloat16, got {str(dtype).removeprefix('torch.')}"
    return None
