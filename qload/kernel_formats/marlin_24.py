"""Marlin 2:4 sparse: kept codes, and metadata with their positions."""

from torch import Tensor

from qload import devices
from qload.errors import PatternError, RepackError
from qload.formats import Marlin24Config, Marlin24Weight
from qload.formats.marlin import DENSE_ROWS
from qload.kernel_formats.marlin_checkpoint import find_unsupported_by_tiles
from qload.kernel_formats.plain_integers import Integers, Origin, from_ordered_groups
from qload.layouts import marlin, marlin_24


def to_integers(weight: Marlin24Weight) -> Integers:
    """Convert to dense plain integers.

    RepackError if the metadata keeps other codes of weight 0 than packers do: dense codes lose this choice.
    """
    codes = weight.codes().plain().T
    expected = marlin_24.choose_positions(2 ** (weight.config.bits - 1) != codes)
    differing = (expected != weight.positions()).nonzero()
    if differing.numel():
        row, n = differing[0].tolist()
        difference = "the metadata keeps another code of weight 0 than packers do"
        reason = f"{difference}, first at kept row {row} of column {n}"
        raise RepackError("marlin_24", "dense layouts", reason)
    return from_ordered_groups(weight, lambda: codes, weight.plain_scales())


def from_integers(integers: Integers, origin: Origin | None = None) -> Marlin24Weight:
    """Convert a 2:4 sparse weight exactly, or raise RepackError.

    `origin`: the checkpoint weight to restore; a share keeps its order of scales.
    """
    integers.reject("marlin_24", _find_unsupported(integers))
    if integers.whole is not None:
        _choose_positions(integers.whole)  # every rank then raises the same error
    bits, codes, positions = integers.bits, devices.plain(integers.unpack()), _choose_positions(integers)
    size = integers.group_size if integers.groups > 1 else -1
    config = origin.config if origin else Marlin24Config(size, bits)
    scales = marlin_24.SCALES_GROUPED.apply(integers.scales) if config.permuted else integers.scales
    return Marlin24Weight(
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


def _find_unsupported(integers: Integers) -> str | None:
    if integers.bits not in marlin.BITS:
        return f"needs 4 or 8 bits, got {integers.bits}"
    return find_unsupported_by_tiles(integers, DENSE_ROWS, "marlin_24")
