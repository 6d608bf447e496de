"""AWQ: words along N, groups of one size in order, zero points stored as they are."""

from qload.formats import AWQConfig, AWQWeight
from qload.formats.awq import BITS
from qload.kernel_formats.plain_integers import Integers, Origin, from_ordered_groups
from qload.layouts import Stored, awq


def to_integers(weight: AWQWeight) -> Integers:
    """Convert to plain integers; exact for every zero point."""
    packing = awq.columns(weight.config.bits)
    zeros = None if weight.qzeros is None else packing.unpack(weight.qzeros)
    return from_ordered_groups(weight, lambda: packing.packed(weight.qweight), weight.scales, zeros)


def from_integers(integers: Integers, origin: Origin | None = None) -> AWQWeight:
    """Convert exactly, or raise RepackError.

    AWQ has 4 or 8 bits, groups of one size in order, and zero points of the same bits. `origin`: the AWQ
    weight to restore, possibly without stored zero points.
    """
    zero_point = origin is None or origin.stores_zeros
    integers.reject("awq", _find_unsupported(integers, zero_point))
    bits, groups, K = integers.bits, integers.groups, integers.layer.K
    packing = awq.columns(bits)
    return AWQWeight(
        config=AWQConfig(-1 if groups == 1 else K // groups, bits, zero_point),
        qweight=integers.pack_codes("qweight", packing, integers.unpack()),
        qzeros=Stored().write(integers.zeros.contiguous(), packing) if zero_point else None,
        scales=integers.scales.contiguous(),
        layer=integers.layer,
    )


def _find_unsupported(integers: Integers, zero_point: bool) -> str | None:
    bits, N, highest = integers.bits, integers.layer.N, integers.span[1]
    if bits not in BITS:
        return f"awq has {' or '.join(map(str, BITS))} bits, got {bits}"
    if N % (32 // bits):
        return f"N = {N} is not a multiple of {32 // bits}: short words"
    reason = integers.find_unordered_groups("awq")
    if reason:
        return reason
    if highest >= 2**bits:
        return f"a zero point of {highest} does not fit {bits} bits"
    if not zero_point and not integers.symmetric:
        return f"a zero point is not {2 ** (bits - 1)}, and zero_point=False stores none"
    return None
