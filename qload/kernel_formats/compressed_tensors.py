"""compressed-tensors, pack-quantized: codes in words along K, zero points in words along N."""

import torch
from torch import Tensor

from qload import devices
from qload.errors import RepackError
from qload.formats import CTPackConfig, CTPackWeight
from qload.formats.gptq import BITS
from qload.kernel_formats.plain_integers import Integers, Origin, record_origin, symmetric_zero_points
from qload.layouts import compressed_tensors
from qload.sentences import WORD_BITS


def to_integers(weight: CTPackWeight) -> Integers:
    """Convert to plain integers.

    RepackError for 5, 6 or 7 bits, for stored input scales, and for unused bits of words other than 0.
    """
    (N, K), bits, config = weight.shape, weight.config.bits, weight.config
    name = weight.layer.name or weight.format
    if bits not in BITS:
        expected = f"{', '.join(map(str, BITS[:-1]))} or {BITS[-1]}"
        raise RepackError(name, "other layouts", f"other layouts have {expected} bits, got {bits}")
    if weight.input_scale is not None or weight.input_zero_point is not None:
        reason = "no kernel format of integers has a field for the stored scale of its inputs"
        raise RepackError(name, "other layouts", reason)
    dense, index, zeros = config.dense is not False, weight.weight_g_idx, weight.weight_zero_point
    for count, stored in ((K, weight.weight_packed), (N, None if zeros is None else zeros.T)):
        if stored is None or not _has_unused_bits(count, bits, dense):
            continue
        codes = compressed_tensors.unpack(stored, count, bits, dense)
        if not torch.equal(compressed_tensors.pack(codes, bits, dense), stored):
            raise RepackError(name, "other layouts", "the unused bits of a word are not 0, and would be lost")
    scales = weight.weight_scale.T.contiguous()
    return Integers(
        bits=bits,
        group_size=config.group_size,
        unpack=lambda: compressed_tensors.packed_codes(weight.weight_packed, K, bits, dense).T,
        scales=scales,
        zeros=compressed_tensors.unpack(zeros.T, N, bits, dense)
        if zeros is not None
        else symmetric_zero_points(bits, scales),
        g_idx=config.in_order(K, scales.device) if index is None else index,
        layer=record_origin(weight, index, stores_zeros=zeros is not None),
    )


def find_skippable_tensor(weight: CTPackWeight) -> str:
    """Return the name of the code tensor if its values affect no refusal; "" if words have unused bits."""
    config, K = weight.config, weight.layer.whole[1]
    return "" if _has_unused_bits(K, config.bits, config.dense is not False) else "weight_packed"


def from_integers(integers: Integers, origin: Origin | None = None) -> CTPackWeight:
    """Convert exactly, or raise RepackError.

    The result has an index if groups are not in order. It has zero points if some differ from 2**(bits - 1),
    or if the source stored them. `origin`: the checkpoint weight to restore, with its tensors and packing.
    """
    origin = origin or _choose_origin(integers)
    bits, dense, codes = integers.bits, origin.config.dense is not False, integers.unpack()
    if _has_unused_bits(integers.layer.K, bits, dense):
        words = compressed_tensors.pack(devices.plain(codes).T, bits, dense)
    else:
        words = integers.pack_codes("weight_packed", compressed_tensors.rows(bits, dense), codes.T)
    zeros = compressed_tensors.pack(integers.zeros, bits, dense).T if origin.stores_zeros else None
    return CTPackWeight(
        config=origin.config,
        weight_packed=words,
        weight_scale=_copy_contiguous(integers.scales.T),
        weight_zero_point=None if zeros is None else _copy_contiguous(zeros),
        weight_g_idx=None if origin.index_dtype is None else integers.g_idx.to(origin.index_dtype),
        layer=integers.layer,
    )


def _choose_origin(integers: Integers) -> Origin:
    """Choose config and optional tensors for integers of another format, or raise RepackError."""
    integers.reject("compressed-tensors", _find_unsupported(integers))
    stores_zeros, indexed = integers.origin.stores_zeros or not integers.symmetric, not integers.in_order
    config = CTPackConfig(
        integers.bits,
        integers.group_size if integers.groups > 1 else -1,
        symmetric=not stores_zeros,
        act_order=indexed,
        dense=True,
        groups_lie="anywhere" if indexed else "in order",
        shape=integers.shape,
    )
    return Origin(CTPackWeight, config, torch.int32 if indexed else None, stores_zeros)


def _find_unsupported(integers: Integers) -> str | None:
    bits, (lowest, highest), groups = integers.bits, integers.span, integers.groups
    if lowest < 0 or highest >= 2**bits:
        return f"a zero point of {lowest if lowest < 0 else highest} does not fit {bits} bits"
    size, K = integers.group_size, integers.layer.K
    if groups > 1 and (size < 1 or -(-K // size) != groups):
        return f"{groups} groups of K = {K} are not of {size} inputs each"
    return None


def _has_unused_bits(count: int, bits: int, dense: bool) -> bool:
    """Return True if the words of `count` codes have bits without a code."""
    return compressed_tensors.words(count, bits, dense) * WORD_BITS != count * bits


def _copy_contiguous(tensor: Tensor) -> Tensor:
    """Copy with the strides of a tensor read from a file; `contiguous()` keeps the stride of an axis of 1."""
    return tensor.clone(memory_format=torch.contiguous_format)
