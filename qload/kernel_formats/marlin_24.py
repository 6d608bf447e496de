"""Marlin 2:4: the kept codes among the dropped, and the metadata that tells them apart."""

from torch import Tensor

from qload import devices
from qload.errors import PatternError, RepackError
from qload.formats import Marlin24Config, Marlin24Weight
from qload.formats.marlin import DENSE_ROWS
from qload.kernel_formats.marlin_checkpoint import why_not_in_tiles
from qload.kernel_formats.plain_integers import Integers, Origin, middle_zero_points, with_origin
from qload.layouts import marlin, marlin_24


def read(weight: Marlin24Weight) -> Integers:
    """The dense codes; refused where nothing could say again which codes of 0 the metadata keeps."""
    bits, scales = weight.config.bits, weight.plain_scales()
    codes = weight.codes().plain().T
    apart = (marlin_24.choose_positions(2 ** (bits - 1) != codes) != weight.positions()).nonzero()
    if apart.numel():
        row, n = apart[0].tolist()
        places = "the metadata keeps a code of 0 elsewhere than packers do"
        reason = f"{places}, first at kept row {row} of column {n}"
        raise RepackError("marlin_24", "dense layouts", reason)
    return Integers(
        bits=bits,
        group_size=weight.config.group_size,
        unpack=lambda: codes,
        scales=scales,
        zeros=middle_zero_points(bits, scales),
        g_idx=weight.config.in_order(weight.layer.K, scales.device),
        layer=with_origin(weight),
    )


def write(integers: Integers, config: Marlin24Config | None = None) -> Marlin24Weight:
    """A weight of which two in every four rows are 0, without them; exact, or RepackError.

    `config`: of the checkpoint it goes back to, whose order of scales a share keeps.
    """
    reason = _why_not(integers)
    if reason:
        raise RepackError(integers.source, "marlin_24", reason)
    if integers.whole is not None:
        _positions(integers.whole)  # refused here, it is refused by every rank in the same words
    bits, codes, positions = integers.bits, devices.plain(integers.unpack()), _positions(integers)
    config = config or Marlin24Config(integers.group_size if integers.groups > 1 else -1, bits)
    scales = marlin_24.SCALES_GROUPED.apply(integers.scales) if config.permuted else integers.scales
    return Marlin24Weight(
        config=config,
        B_24=marlin_24.rows(bits).pack(marlin_24.gather(codes, positions)),
        B_meta=marlin_24.write_positions(positions),
        s=scales.contiguous(),
        layer=integers.layer,
    )


def back(integers: Integers, origin: Origin) -> Marlin24Weight:
    """As it was stored."""
    return write(integers, origin.config)


def _positions(integers: Integers) -> Tensor:
    try:
        return marlin_24.choose_positions(devices.plain(integers.unpack()) != 2 ** (integers.bits - 1))
    except PatternError as error:
        raise RepackError(integers.source, "marlin_24", error.detail) from error


def _why_not(integers: Integers) -> str | None:
    if integers.bits not in marlin.BITS:
        return f"needs 4 or 8 bits, got {integers.bits}"
    return why_not_in_tiles(integers, DENSE_ROWS, "marlin_24")
