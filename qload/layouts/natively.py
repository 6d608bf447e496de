"""Packings as the native routines take them: where each code lies, or which bits of a run go where."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qload import native
from qload.layouts.order import Order, strides

if TYPE_CHECKING:
    from qload.layouts.packed_codes import PackedCodes
    from qload.layouts.packing import Packing

Axis = list[native.AxisDigit]
Place = tuple[int, int]  # size and stride
WORD_BITS = 32
TURNED = Order("w n -> n w")
MOST_WORDS = 32  # of a run, codes as well as words


def pack(packing: "Packing", codes: Tensor, words: Tensor) -> int | None:
    """int32 codes -> new words; all bits that the codes had, or None where torch has to do it."""
    if is_whole(packing):
        return native.pack(codes, packing.bits, *places(packing, tuple(codes.shape)), words)
    run = lanes(packing, codes, words)
    if run is None:
        return None
    fields = [native.FieldMove(f.code, f.word, f.low, f.bit, f.width) for f in packing.fields]
    return native.fields(codes, words, fields, (run_of(packing), packing.words), *run)


def unpack(packing: "Packing", words: Tensor, codes: Tensor) -> bool:
    """Words -> codes that are new, or False where torch has to do it."""
    if is_whole(packing):
        return native.unpack(words.contiguous(), packing.bits, *places(packing, tuple(codes.shape)), codes)
    run = lanes(packing, codes, words)
    if run is None or codes.dtype != torch.int32:
        return False
    (code, word), there = run
    back = [native.Digit(lane.size, lane.target, lane.source) for lane in there]
    fields = [native.FieldMove(f.word, f.code, f.bit, f.low, f.width) for f in packing.fields]
    return (
        native.fields(words, codes, fields, (packing.words, run_of(packing)), (word, code), back) is not None
    )


@cache
def is_whole(packing: "Packing") -> bool:
    """Whether words hold whole codes one after another, so that each digit of codes has one stride."""
    small = native.fits(packing.bits, packing.granule(0), packing.granule(1))
    return small and packing.bits in native.PACKED and in_turn(packing)


@cache
def in_turn(packing: "Packing") -> bool:
    """Whether a run is one word, which holds whole codes one after another."""
    found = [(f.code, f.low, f.word, f.bit) for f in packing.fields]
    return found == [(i, 0, 0, i * packing.bits) for i in range(run_of(packing))]


@cache
def places(packing: "Packing", shape: tuple[int, ...]) -> tuple[Axis, Axis]:
    """The digits of each axis of codes, innermost first, with their strides in a whole packing's words."""
    order = packing.codes
    size = order.digits(shape, order.left)
    extents = [prod(size[digit] for digit in group) for group in order.right]
    stride = strides(order.right, size, [prod(extents[axis + 1 :]) for axis in range(len(extents))])
    rows, columns = (
        [native.AxisDigit(size[digit], stride[digit]) for digit in reversed(group)] for group in order.left
    )
    return rows, columns


def lanes(
    packing: "Packing", codes: Tensor, words: Tensor
) -> tuple[tuple[int, int], list[native.Digit]] | None:
    """The strides of a run's codes and of its words, and where runs lie; None: they have no one stride."""
    *_, run = packing.codes.right
    if len(run) > 1 or max(run_of(packing), packing.words) > MOST_WORDS:
        return None
    size = packing.codes.digits(tuple(codes.shape), packing.codes.left)
    here = strides(packing.codes.left, size, codes.stride())
    there = strides(packing.stored, {**size, "w": packing.words}, words.stride())
    runs = [native.Digit(size[digit], here[digit], there[digit]) for digit in size if digit not in run]
    runs.sort(key=lambda lane: (lane.target, lane.source), reverse=True)
    return (here[run[0]], there.get("w", 1)), runs


def run_of(packing: "Packing") -> int:
    """How many codes a run has."""
    return prod(size for digit, size in packing.codes.sizes if digit in packing.codes.right[-1])


def repack(packed: "PackedCodes", target: "Packing", words: Tensor) -> bool:
    """From the words of one packing to those of another, or False where codes have to be spelled out."""
    source = packed.packing
    if source.bits != target.bits:
        return False
    if is_whole(source) and is_whole(target):
        return _gather(packed, target, words) if packed.order is not None else _move(packed, target, words)
    alike = (source.pattern, source.sizes) == (target.pattern, target.sizes)
    if not alike or packed.turned or packed.order is not None:
        return False
    run = lanes(target, packed.words.new_empty(packed.shape, device="meta"), words)
    if run is None:
        return False
    fields = [
        native.FieldMove(a.word, b.word, a.bit + low - a.low, b.bit + low - b.low, high - low)
        for a in source.fields
        for b in target.fields
        for low, high in [(max(a.low, b.low), min(a.low + a.width, b.low + b.width))]
        if a.code == b.code and low < high
    ]
    (_, word), there = run
    back = [native.Digit(lane.size, lane.target, lane.target) for lane in there]
    words_of_run = (source.words, target.words)
    return (
        native.fields(packed.words.contiguous(), words, fields, words_of_run, (word, word), back) is not None
    )


def _move(packed: "PackedCodes", target: "Packing", words: Tensor) -> bool:
    here = places(packed.packing, tuple(packed.packing.shape_of(packed.words)))
    there = places(target, packed.shape)
    digits = []
    for ours, theirs in zip(here[::-1] if packed.turned else here, there, strict=True):
        both = common(ours, theirs)
        if both is None:
            return False
        digits += both
    return native.move(packed.words.contiguous(), words, target.bits, digits)


def common(ours: Sequence[Place], theirs: Sequence[Place]) -> list[native.Digit] | None:
    """The digits of an axis that both sides are made of, innermost first; None where one cuts another's."""
    digits, left, right = [], list(ours), list(theirs)
    while left and right:
        (a, source), (b, target) = left.pop(0), right.pop(0)
        size = min(a, b)
        if size == 0:
            return [native.Digit(0, 0, 0)]
        if a % size or b % size:
            return None
        digits.append(native.Digit(size, source, target))
        if a > size:
            left.insert(0, (a // size, source * size))
        if b > size:
            right.insert(0, (b // size, target * size))
    return digits


def _gather(packed: "PackedCodes", target: "Packing", words: Tensor) -> bool:
    """Rows in another order."""
    if packed.order is None:
        return False
    lying = places(packed.packing, tuple(packed.packing.shape_of(packed.words)))
    rows, columns = places(target, packed.shape)[:: -1 if packed.turned else 1]
    source = packed.words.contiguous()
    return native.gather(source, target.bits, packed.order, lying, rows, columns, words)


def dense(words: Tensor) -> Tensor:
    """Contiguous, and also seen as bytes: an axis of one word may have any stride and be contiguous."""
    whole = words.contiguous()
    return whole if whole.stride(-1) == 1 else whole.clone(memory_format=torch.contiguous_format)


@cache
def stream_along(packing: "Packing") -> int | None:
    """The axis that codes of any width follow each other along, bit after bit; None where they do not."""
    (*outer, run), stored = packing.codes.right, packing.stored
    straight = all(f.word * WORD_BITS + f.bit == f.code * packing.bits + f.low for f in packing.fields)
    if not straight or run_of(packing) * packing.bits != packing.words * WORD_BITS:
        return None
    for axis, digits in enumerate(packing.codes.left):
        here, other = stored[axis], 1 - axis
        alike = len(outer) == 2 and packing.codes.left[other] == stored[other]
        if alike and here in ((*digits[:-1], "w"), digits[:-1]) and digits[-1:] == run and len(digits) == 2:
            return axis
    return None


def dequantize_stream(packed: "PackedCodes", meaning: native.Meaning, out: Tensor) -> bool:
    """Rows that are streams of codes of any width; where words lie the other way, a block at a time."""
    words, bits = packed.words, packed.packing.bits
    if packed.order is not None or words.device.type != "cpu" or not native.has_routines(words, out):
        return False
    if stream_along(packed.packing) != (0 if packed.turned else 1):
        return False
    if not packed.turned:
        return native.dequantize_rows(dense(words).view(torch.uint8), bits, meaning, False, out)
    step = max(1, 8 * native.block(out) // max(1, out.shape[1]))
    return not out.numel() or all(
        native.dequantize_rows(
            TURNED.apply(words[:, start : start + step]).view(torch.uint8),
            bits,
            meaning.of_rows(slice(start, start + step)),
            False,
            out[start : start + step],
        )
        for start in range(0, out.shape[0], step)
    )


def of_order(meaning: native.Meaning, order: Tensor) -> native.Meaning:
    """With the group of each code, in the order that codes lie in: value i is of code order[i]."""
    groups = meaning.k_group
    if groups is None:
        groups = torch.arange(order.numel(), dtype=torch.int32) // meaning.run
    lying = torch.empty_like(groups)
    lying[order.long()] = groups
    return replace(meaning, k_group=lying)
