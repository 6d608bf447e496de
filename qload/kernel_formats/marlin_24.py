"""Marlin 2:4 sparse: kept codes, and metadata with their positions."""

from torch import Tensor

from qload import devices
from qload.errors import PatternError, RepackError
from qload.formats import Marlin24Config, Marlin24Weight
from qload.formats.marlin import DENSE_ROWS
from qload.kernel_formats.marlin_checkpoint import find_unsupported_by_tiles
from qload.kernel_formats.plain_integers import Integers, record_origin, symmetric_zero_points
from qload.layouts import marlin, marlin_24


def to_integers(weight: Marlin24Weight) -> Integers:
    """Convert to dense plain integers.

    RepackError if the metadata keeps other codes of weight 0 than packers do: dense codes lose this choice.
    """
    bits, scales = weight.config.bits, weight.plain_scales()
    codes = weight.codes().plain().T
    differing = (marlin_24.choose_positions(2 ** (bits - 1) != codes) != weight.positions()).nonzero()
    if differing.numel():
        row, n = differing[0].tolist()
        difference = "the metadata keeps another code of weight 0 than packers do"
        reason = f"{difference}, first at kept row {row} of column {n}"
        raise RepackError("marlin_24", "dense layouts", reason)
    return Integers(
        bits=bits,
        group_size=weight.config.group_size,
        unpack=lambda: codes,
        scales=scales,
        zeros=symmetric_zero_points(bits, scales),
        g_idx=weight.config.in_order(weight.layer.K, scales.device),
        layer=record_origin(weight),
    )


def from_integers(integers: Integers, config: Marlin24Config | None = None) -> Marlin24Weight:
    """Convert a 2:4 sparse weight exactly, or raise RepackError.

    `config`: that of the original checkpoint, whose order of scales a share keeps.
    """
    reason = _find_unsupported(integers)
    if reason:
        raise RepackError(integers.source, "marlin_24", reason)
    if integers.whole is not None:
        _choose_positions(integers.whole)  # every rank then raises the same error
    bits, codes, positions = integers.bits, devices.plain(integers.unpack()), _choose_positions(integers)
    config = config or Marlin24Config(integers.group_size if integers.groups > 1 else -1, bits)
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
