"""AWQ <-> GPTQ: the same codes packed along the other axis, groups written out or left implied."""

import torch

from qload.errors import RepackError
from qload.formats import AWQConfig, AWQWeight, GPTQWeight
from qload.formats.awq import BITS
from qload.kernels import gptq
from qload.layouts import Stored, awq


def to_gptq(weight: AWQWeight) -> GPTQWeight:
    """Exact for every zero point, which are stored as they are; K has to fill whole words."""
    return gptq.from_codes(weight.codes(), weight.scales, weight.layer)


def from_gptq(weight: GPTQWeight, zero_point: bool = True) -> AWQWeight:
    """Exact, or refused: AWQ has 4 or 8 bits, groups of one size in order, and zero points of those bits.

    `zero_point`: whether zero points are stored, or left out because all are 2**(bits - 1).
    """
    reason = _why_not(weight, zero_point)
    if reason:
        raise RepackError("gptq", "awq", reason)
    bits, groups, K = weight.config.bits, weight.scales.shape[0], weight.layer.K
    packing = awq.columns(bits)
    return AWQWeight(
        config=AWQConfig(-1 if groups == 1 else K // groups, bits, zero_point),
        qweight=packing.pack(weight.codes().codes.T),
        qzeros=Stored().write(gptq.zero_points(weight), packing) if zero_point else None,
        scales=weight.scales,
        layer=weight.layer,
    )


def _why_not(weight: GPTQWeight, zero_point: bool) -> str | None:
    bits, groups, K = weight.config.bits, weight.scales.shape[0], weight.layer.K
    if bits not in BITS:
        return f"awq has {' or '.join(map(str, BITS))} bits, got {bits}"
    if K % groups:
        return f"K = {K} does not divide into {groups} groups of one size"
    if not bool((weight.g_idx == torch.arange(K, device=weight.device) // (K // groups)).all()):
        return "the groups are not in order along K (act order), and awq has no g_idx"
    highest = int(gptq.zero_points(weight).max())
    if highest >= 2**bits:
        return f"a zero point of {highest} does not fit {bits} bits"
    if not zero_point and not gptq.is_symmetric(weight):
        return f"a zero point is not {2 ** (bits - 1)}, and none are stored"
    return None
