"""GPTQ: words along K, a group index, and zero points in any of their conventions."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import plain_integers
from qload.kernel_formats.plain_integers import Integers, Origin, record_origin
from qload.layouts import STORED_MINUS_ONE, ZeroPoints, gptq
from qload.sentences import WORD_BITS
from qload.spec import Codes, Layer


def to_integers(weight: GPTQWeight) -> Integers:
    """Convert to plain integers: codes, logical zero points, and the group of each row."""
    bits, scales, symmetric = weight.config.bits, weight.scales, is_symmetric(weight)
    if symmetric:  # all zero points share one element
        zeros = scales.new_full((1, 1), 2 ** (bits - 1), dtype=torch.int32).expand(scales.shape)
    else:
        zeros = weight.config.zeros.read(weight.qzeros, gptq.columns(bits))
    return Integers(
        bits=bits,
        group_size=weight.config.group_size,
        unpack=lambda: gptq.rows(bits).packed(weight.qweight),
        scales=scales,
        zeros=zeros,
        g_idx=weight.groups_of_inputs(),
        layer=record_origin(weight, weight.g_idx),
        convention=weight.config.zeros,
        gptq_words=weight.qweight,
        known_symmetric=symmetric,
    )


def has_ordered_groups(weight: GPTQWeight) -> bool:
    """Return True if the config says groups are in order and the number of groups agrees."""
    config, K = weight.config, weight.layer.K
    return config.positional and config.group_size > 0 and config.groups(K) == weight.scales.shape[0]


def is_symmetric(weight: GPTQWeight) -> bool:
    """Return True if every word of zero points has all zero points 2**(bits - 1); unpacks nothing."""
    word = _symmetric_word(weight.config.bits, weight.config.zeros)
    if word is None:
        return False
    words = weight.qzeros
    if type(words) is Tensor and words.device.type == "cpu":  # numpy: one thread suffices for few words
        return bool((words.numpy() == word).all())
    return bool((words == word).all())


@cache
def _symmetric_word(bits: int, zeros: ZeroPoints) -> int | None:
    """Return the word of zero points 2**(bits - 1); None for 3 bits, with several words in rotation."""
    if WORD_BITS % bits:
        return None
    fill = torch.full((1, WORD_BITS // bits), 2 ** (bits - 1), dtype=torch.int32)
    return int(zeros.write(fill, gptq.columns(bits)))


def from_integers(integers: Integers, zeros: ZeroPoints | None = None) -> GPTQWeight:
    """Convert exactly, or raise RepackError for short words or zero points beyond the convention.

    `zeros`: convention of stored zero points; None: minus one.
    """
    zeros = zeros or STORED_MINUS_ONE
    integers.reject("gptq", find_unsupported(integers))
    config, origin, qweight = _choose_config(integers, zeros), integers.origin, integers.gptq_words
    if qweight is None:
        qweight = integers.pack_codes("qweight", gptq.rows(integers.bits), integers.unpack())
    return GPTQWeight(
        config=config,
        qweight=qweight,
        qzeros=pack_zero_points(integers, zeros),
        scales=integers.scales.contiguous(),
        g_idx=None if config.indexed is False else integers.g_idx.to(origin.index_dtype or torch.int32),
        layer=integers.layer,
    )


def from_codes(codes: Codes, scales: Tensor, layer: Layer, config: GPTQConfig) -> GPTQWeight:
    """Make a GPTQ weight with `config` of codes in plain order, and scales (G, N) in their own dtype."""
    with_origin = replace(layer, origin=Origin(GPTQWeight, config))
    integers = plain_integers.from_codes(codes, scales, with_origin, config.group_size)
    return replace(from_integers(integers, config.zeros), layer=layer)


def restore(integers: Integers, origin: Origin) -> GPTQWeight:
    """Restore the checkpoint weight."""
    return from_integers(integers, origin.config.zeros)


def pack_zero_points(integers: Integers, zeros: ZeroPoints) -> Tensor:
    """Pack zero points along N in the convention `zeros`; RepackError for values beyond its range."""
    lower, upper = zeros.span(integers.bits)
    lowest, highest = integers.span
    for value, violation in ((highest, f"above {upper}"), (lowest, f"below {lower}")):
        if value > upper or value < lower:
            integers.reject(f"zero points {zeros.name}", f"a zero point of {value} is {violation}")
    return zeros.write(integers.zeros.contiguous(), gptq.columns(integers.bits))


def find_unsupported(integers: Integers) -> str | None:
    """Return the reason if rows or columns do not fill the words of GPTQ, else None."""
    fill = WORD_BITS if integers.bits == 3 else WORD_BITS // integers.bits
    for dim, size in zip("NK", integers.shape, strict=True):
        if size % fill:
            return f"{dim} = {size} is not a multiple of {fill}: short words"
    return None


def _choose_config(integers: Integers, zeros: ZeroPoints) -> GPTQConfig:
    """Return the config of the original GPTQ weight, or one made from the groups."""
    origin = integers.origin
    if isinstance(origin.config, GPTQConfig):
        return replace(origin.config, zeros=zeros)
    several = integers.groups > 1
    size = integers.group_size if several else -1
    return GPTQConfig(integers.bits, size, zeros, positional=several and integers.in_order)
