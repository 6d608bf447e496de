"""GPTQ: words along K, an index of groups, and zero points in any of their conventions."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from qload.errors import RepackError
from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats.plain_integers import Integers, Origin, with_origin
from qload.layouts import Stored, ZeroPoints, gptq
from qload.sentences import WORD_BITS
from qload.spec import Codes, Layer


def read(weight: GPTQWeight) -> Integers:
    """Codes, zero points as they are meant, and the group of each row."""
    config, middle = weight.config, is_middle(weight)
    return Integers(
        bits=config.bits,
        group_size=config.group_size,
        unpack=lambda: gptq.rows(config.bits).packed(weight.qweight),
        scales=weight.scales,
        zeros=_zeros(weight, middle),
        g_idx=weight.groups_of_inputs(),
        layer=with_origin(weight, weight.g_idx),
        convention=config.zeros,
        words=weight.qweight,
        middle=middle,
    )


def is_ordered(weight: GPTQWeight) -> bool:
    """Whether the config says that the groups lie in order, and there are as many as that takes."""
    config, K = weight.config, weight.layer.K
    return config.positional and config.group_size > 0 and config.groups(K) == weight.scales.shape[0]


def _zeros(weight: GPTQWeight, middle: bool) -> Tensor:
    """Zero points (G, N); middle ones share one element."""
    bits, scales = weight.config.bits, weight.scales
    if middle:
        return scales.new_full((1, 1), 2 ** (bits - 1), dtype=torch.int32).expand(scales.shape)
    return weight.config.zeros.read(weight.qzeros, gptq.columns(bits))


def is_middle(weight: GPTQWeight) -> bool:
    """Whether each word of zero points is that of middle ones, which spares spelling them out."""
    word = _middle_word(weight.config.bits, weight.config.zeros)
    if word is None:
        return False
    words = weight.qzeros
    if type(words) is Tensor and words.device.type == "cpu":  # by one thread: few words are not worth a team
        return bool((words.numpy() == word).all())
    return bool((words == word).all())


@cache
def _middle_word(bits: int, zeros: ZeroPoints) -> int | None:
    """The word that holds middle zero points alone; None where several words do in turns."""
    if WORD_BITS % bits:
        return None
    fill = torch.full((1, WORD_BITS // bits), 2 ** (bits - 1), dtype=torch.int32)
    return int(zeros.write(fill, gptq.columns(bits)))


def write(integers: Integers, zeros: ZeroPoints) -> GPTQWeight:
    """Exact, or RepackError where rows fill no words or a zero point cannot be said."""
    reason = why_not(integers)
    if reason:
        raise RepackError(integers.source, "gptq", reason)
    config, origin = config_of(integers, zeros), integers.origin
    index = torch.int32 if origin.index is None else origin.index
    return GPTQWeight(
        config=config,
        qweight=_rows(integers) if integers.words is None else integers.words,
        qzeros=words(integers, zeros),
        scales=integers.scales.contiguous(),
        g_idx=None if config.indexed is False else integers.g_idx.to(index),
        layer=integers.layer,
    )


def _rows(integers: Integers) -> Tensor:
    return integers.packed("qweight", gptq.rows(integers.bits), integers.unpack())


def back(integers: Integers, origin: Origin) -> GPTQWeight:
    """As it was stored."""
    return write(integers, origin.config.zeros)


def from_codes(codes: Codes, scales: Tensor, layer: Layer, config: GPTQConfig) -> GPTQWeight:
    """Codes in plain order, and scales (G, N) in their own dtype, as a GPTQ weight of this config."""
    assert codes.zeros is not None
    assert codes.k_group is not None
    return replace(
        write(
            Integers(
                bits=codes.bits,
                group_size=config.group_size,
                unpack=lambda: codes.codes.T,
                scales=scales,
                zeros=codes.zeros.T,
                g_idx=codes.k_group,
                layer=replace(layer, origin=Origin(GPTQWeight, config)),
            ),
            config.zeros,
        ),
        layer=layer,
    )


def words(integers: Integers, zeros: ZeroPoints) -> Tensor:
    """Zero points along N in a convention, or RepackError where it cannot say them."""
    lowest, highest = zeros.span(integers.bits)
    least, most = integers.span
    for value, wrong in ((most, f"above {highest}"), (least, f"below {lowest}")):
        if value > highest or value < lowest:
            reason = f"a zero point of {value} is {wrong}"
            raise RepackError(integers.source, f"zero points {zeros.name}", reason)
    return zeros.write(integers.zeros.contiguous(), gptq.columns(integers.bits))


def why_not(integers: Integers) -> str | None:
    """Why rows or columns do not fill GPTQ's words, or None."""
    fill = WORD_BITS if integers.bits == 3 else WORD_BITS // integers.bits
    for dim, size in zip("NK", integers.shape, strict=True):
        if size % fill:
            return f"{dim} = {size} is not a multiple of {fill}: short words"
    return None


def config_of(integers: Integers, zeros: ZeroPoints | None = None) -> GPTQConfig:
    """That of the GPTQ weight it once was, or of its groups as they lie."""
    zeros, origin = zeros or Stored(), integers.origin
    if isinstance(origin.config, GPTQConfig):
        return replace(origin.config, zeros=zeros)
    several = integers.groups > 1
    size = integers.group_size if several else -1
    return GPTQConfig(integers.bits, size, zeros, positional=several and integers.in_order)


def size_of(groups: int, g_idx: Tensor) -> int:
    """How many rows a group has, where only the index tells: as many as the largest; -1: one group."""
    return int(torch.bincount(g_idx.long()).max()) if groups > 1 else -1
