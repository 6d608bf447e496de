"""Marlin 2:4 <-> GPTQ: the kept codes among the dropped, and the metadata that tells them apart."""

from qload.errors import PatternError, RepackError
from qload.formats import GPTQWeight, Marlin24Config, Marlin24Weight
from qload.formats.marlin_24 import ROWS, SCALES
from qload.kernels.gptq import from_codes, in_order, is_symmetric
from qload.layouts import gptq, marlin, marlin_24


def to_gptq(weight: Marlin24Weight) -> GPTQWeight:
    """The dense codes; refused where GPTQ could not say again which codes of 0 the metadata keeps."""
    codes = weight.codes()
    present = 2 ** (weight.config.bits - 1) != codes.codes.T
    apart = (marlin_24.choose(present) != weight.positions()).nonzero()
    if apart.numel():
        row, n = apart[0].tolist()
        places = "the metadata keeps a code of 0 elsewhere than packers do"
        raise RepackError("marlin_24", "gptq", f"{places}, first at kept row {row} of column {n}")
    return from_codes(codes, weight.plain_scales(), weight.layer)


def from_gptq(weight: GPTQWeight, config: Marlin24Config | None = None) -> Marlin24Weight:
    """A weight of which two in every four rows are 0, without them; exact, or RepackError.

    `config`: of the checkpoint it goes back to, whose order of scales a share keeps.
    """
    reason = _why_not(weight)
    if reason:
        raise RepackError("gptq", "marlin_24", reason)
    bits, groups = weight.config.bits, weight.scales.shape[0]
    codes = gptq.rows(bits).unpack(weight.qweight)
    try:
        positions = marlin_24.choose(codes != 2 ** (bits - 1))
    except PatternError as error:
        raise RepackError("gptq", "marlin_24", error.detail) from error
    config = config or Marlin24Config(weight.config.group_size if groups > 1 else -1, bits)
    return Marlin24Weight(
        config=config,
        B_24=marlin_24.rows(bits).pack(marlin_24.gather(codes, positions)),
        B_meta=marlin_24.write_positions(positions),
        s=marlin_24.SCALES_GROUPED.apply(weight.scales) if config.permuted else weight.scales,
        layer=weight.layer,
    )


def _why_not(weight: GPTQWeight) -> str | None:
    (N, K), config = weight.shape, weight.config
    if config.bits not in marlin.BITS:
        return f"needs 4 or 8 bits, got {config.bits}"
    if K % ROWS or N % marlin.TILE_N:
        return f"needs K, N in multiples of {ROWS}, {marlin.TILE_N}; got {K}, {N}"
    if not in_order(weight) or K % config.rows_of_a_group(K):
        return "the groups are not in order along K, all of one size, and there is no g_idx"
    if not is_symmetric(weight):
        return f"a zero point is not {2 ** (config.bits - 1)}, and none are stored"
    if weight.scales.dtype not in SCALES:
        return f"needs scales in float16 or bfloat16, got {str(weight.scales.dtype).removeprefix('torch.')}"
    return None
