"""AWQ: words along N, groups of one size in order, zero points as they are."""

from qload.errors import RepackError
from qload.formats import AWQConfig, AWQWeight
from qload.formats.awq import BITS
from qload.kernel_formats.plain_integers import Integers, Origin, middle_zero_points, with_origin
from qload.layouts import Stored, awq


def read(weight: AWQWeight) -> Integers:
    """Codes and zero points; exact for every zero point."""
    config, packing = weight.config, awq.columns(weight.config.bits)
    zeros = None if weight.qzeros is None else packing.unpack(weight.qzeros)
    return Integers(
        bits=config.bits,
        group_size=config.group_size,
        unpack=lambda: packing.packed(weight.qweight),
        scales=weight.scales,
        zeros=middle_zero_points(config.bits, weight.scales) if zeros is None else zeros,
        g_idx=config.in_order(weight.layer.K, weight.scales.device),
        layer=with_origin(weight, keeps_zeros=zeros is not None),
    )


def write(integers: Integers, zero_point: bool = True) -> AWQWeight:
    """Exact, or refused: AWQ has 4 or 8 bits, groups of one size in order, and zero points of those bits.

    `zero_point`: whether zero points are stored, or left out because all are 2**(bits - 1).
    """
    reason = _why_not(integers, zero_point)
    if reason:
        raise RepackError(integers.source, "awq", reason)
    bits, groups, K = integers.bits, integers.groups, integers.layer.K
    packing = awq.columns(bits)
    return AWQWeight(
        config=AWQConfig(-1 if groups == 1 else K // groups, bits, zero_point),
        qweight=integers.packed("qweight", packing, integers.unpack()),
        qzeros=Stored().write(integers.zeros.contiguous(), packing) if zero_point else None,
        scales=integers.scales.contiguous(),
        layer=integers.layer,
    )


def back(integers: Integers, origin: Origin) -> AWQWeight:
    """As it was stored."""
    return write(integers, origin.keeps_zeros)


def _why_not(integers: Integers, zero_point: bool) -> str | None:
    bits, N, highest = integers.bits, integers.layer.N, integers.span[1]
    if bits not in BITS:
        return f"awq has {' or '.join(map(str, BITS))} bits, got {bits}"
    if N % (32 // bits):
        return f"N = {N} is not a multiple of {32 // bits}: short words"
    reason = integers.why_no_index("awq")
    if reason:
        return reason
    if highest >= 2**bits:
        return f"a zero point of {highest} does not fit {bits} bits"
    if not zero_point and not integers.symmetric:
        return f"a zero point is not {2 ** (bits - 1)}, and zero_point=False stores none"
    return None
