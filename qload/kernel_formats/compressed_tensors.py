"""compressed-tensors, pack-quantized: words along K whose last may be short, everything else along N."""

import torch
from torch import Tensor

from qload import devices
from qload.errors import RepackError
from qload.formats import CTPackConfig, CTPackWeight
from qload.formats.gptq import BITS
from qload.kernel_formats.plain_integers import Integers, Origin, middle_zero_points, with_origin
from qload.layouts import compressed_tensors
from qload.sentences import WORD_BITS


def read(weight: CTPackWeight) -> Integers:
    """Codes, zero points where there are some, and the group of each input, written out or not."""
    (N, K), bits, config = weight.shape, weight.config.bits, weight.config
    if bits not in BITS:
        raise RepackError(
            weight.layer.name or weight.format,
            "other layouts",
            f"other layouts have {', '.join(map(str, BITS[:-1]))} or {BITS[-1]} bits, got {bits}",
        )
    if weight.input_scale is not None or weight.input_zero_point is not None:
        reason = "no kernel format of integers holds the stored scale of its inputs"
        raise RepackError(weight.layer.name or weight.format, "other layouts", reason)
    dense, index, zeros = config.dense is not False, weight.weight_g_idx, weight.weight_zero_point
    for count, stored in ((K, weight.weight_packed), (N, None if zeros is None else zeros.T)):
        if stored is not None and _spare(count, bits, dense):
            again = compressed_tensors.pack(
                compressed_tensors.unpack(stored, count, bits, dense), bits, dense
            )
            if not torch.equal(again, stored):
                name = weight.layer.name or weight.format
                raise RepackError(
                    name, "other layouts", "bits that hold no code are not 0, and would be lost"
                )
    scales = weight.weight_scale.T.contiguous()
    return Integers(
        bits=bits,
        group_size=config.group_size,
        unpack=lambda: compressed_tensors.packed_codes(weight.weight_packed, K, bits, dense).T,
        scales=scales,
        zeros=compressed_tensors.unpack(zeros.T, N, bits, dense)
        if zeros is not None
        else middle_zero_points(bits, scales),
        g_idx=config.in_order(K, scales.device) if index is None else index,
        layer=with_origin(weight, index, keeps_zeros=zeros is not None),
    )


def bulk(weight: CTPackWeight) -> str:
    """The words of codes decide nothing, where all of their bits hold codes."""
    config, K = weight.config, weight.layer.whole[1]
    return "" if _spare(K, config.bits, config.dense is not False) else "weight_packed"


def back(integers: Integers, origin: Origin) -> CTPackWeight:
    """The tensors there were, in the packing they were in."""
    config = origin.config
    dense = config.dense is not False
    zeros = compressed_tensors.pack(integers.zeros, integers.bits, dense).T if origin.keeps_zeros else None
    return CTPackWeight(
        config=config,
        weight_packed=compressed_tensors.pack(devices.plain(integers.unpack()).T, integers.bits, dense),
        weight_scale=_stored(integers.scales.T),
        weight_zero_point=None if zeros is None else _stored(zeros),
        weight_g_idx=None if origin.index is None else integers.g_idx.to(origin.index),
        layer=integers.layer,
    )


def write(integers: Integers) -> CTPackWeight:
    """Exact, or RepackError; with an index where groups are not in order, and zero points where some differ.

    Zero points that were stored stay so, although all are 2**(bits - 1).
    """
    reason = _why_not(integers)
    if reason:
        raise RepackError(integers.source, "compressed-tensors", reason)
    (N, K), bits, groups = integers.shape, integers.bits, integers.groups
    stored, indexed = integers.origin.keeps_zeros or not integers.symmetric, not integers.in_order
    config = CTPackConfig(
        bits,
        integers.group_size if groups > 1 else -1,
        symmetric=not stored,
        act_order=indexed,
        dense=True,
        groups_lie="anywhere" if indexed else "in order",
        shape=(N, K),
    )
    return CTPackWeight(
        config=config,
        weight_packed=_words(integers),
        weight_scale=_stored(integers.scales.T),
        weight_zero_point=_stored(compressed_tensors.pack(integers.zeros, bits, True).T) if stored else None,
        weight_g_idx=integers.g_idx.to(torch.int32) if indexed else None,
        layer=integers.layer,
    )


def _words(integers: Integers) -> Tensor:
    """Codes in words along K; spelled out only where the last words are short."""
    bits, codes = integers.bits, integers.unpack()
    if _spare(integers.layer.K, bits, True):
        return compressed_tensors.pack(devices.plain(codes).T, bits, True)
    return integers.packed("weight_packed", compressed_tensors.rows(bits, True), codes.T)


def _why_not(integers: Integers) -> str | None:
    bits, (lowest, highest), groups = integers.bits, integers.span, integers.groups
    if lowest < 0 or highest >= 2**bits:
        return f"a zero point of {lowest if lowest < 0 else highest} does not fit {bits} bits"
    size, K = integers.group_size, integers.layer.K
    if groups > 1 and (size < 1 or -(-K // size) != groups):
        return f"{groups} groups of K = {K} are not of {size} inputs each"
    return None


def _spare(count: int, bits: int, dense: bool) -> bool:
    """Whether words have bits that hold none of so many codes."""
    return compressed_tensors.words(count, bits, dense) * WORD_BITS != count * bits


def _stored(tensor: Tensor) -> Tensor:
    """With the strides of a tensor that was read; `contiguous` leaves those of an axis of 1 alone."""
    return tensor.clone(memory_format=torch.contiguous_format)
