"""Packings in plain torch, the reference: block after block, of a size that fits a cache.

Words come first into the order that their codes are wanted in: they are an eighth as many as codes of four
bits. Then codes are shifted out place by place or, where those of one word stay neighbours, all at once.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

import torch
from torch import Tensor

from qload.devices.operands import CodeValues, group_runs, values
from qload.devices.tensors import block, dense
from qload.dtypes import TORCH, DtypeLike
from qload.sentences import AxisDigits, WordSentence
from qload.sentences.strided_digits import WHOLE_BITS, runs_in_turn

Sizes = Mapping[str, int]
BYTE = 8
# How a byte of codes becomes a byte each: in integers of as many bytes, by shifts up and masks.
SPREAD = {2: (torch.int32, ((12, 0x000F000F), (6, 0x03030303))), 4: (torch.int16, ((4, 0x0F0F),))}


def move(tensor: Tensor, wide: Tensor, size: Sizes, source: AxisDigits, target: AxisDigits) -> None:
    """Move the elements of a tensor, whose axes have the digits `source`, to the order of `target`."""
    digits = [digit for group in source for digit in group]
    wanted = [digit for group in target for digit in group]
    apart = tensor.reshape([size[digit] for digit in digits])
    moved = apart.permute([digits.index(digit) for digit in wanted])
    wide.view([size[digit] for digit in wanted]).copy_(moved)


def pack(packing: WordSentence, codes: Tensor, words: Tensor) -> None:
    """Pack int32 codes into words, and write each word."""
    axis = 0 if codes.stride(0) >= codes.stride(1) else 1
    for part, at in _blocks(packing, codes, axis):
        _pack(packing, part, _cut(packing, words, tuple(codes.shape), axis, at))


def unpack(packing: WordSentence, words: Tensor, codes: Tensor) -> None:
    """Words -> int32 or uint8 codes, laid out in any way."""
    axis = 0 if codes.stride(0) >= codes.stride(1) else 1
    for part, at in _blocks(packing, codes, axis):
        _unpack(packing, _cut(packing, words, tuple(codes.shape), axis, at), part)


def rows_of_codes(
    packing: WordSentence, words: Tensor, turned: bool, count: int
) -> Iterator[tuple[slice, Tensor]]:
    """Rows after rows of the codes, or of turned ones, about `count` codes at a time: uint8, contiguous."""
    shape, axis = packing.shape_of_codes(words.shape), 1 if turned else 0
    for at in _cuts(packing, shape, axis, count):
        codes = words.new_empty((at.stop - at.start, shape[1 - axis]), dtype=torch.uint8)
        _unpack(packing, _cut(packing, words, shape, axis, at), codes.T if turned else codes)
        yield at, codes


def dequantize(codes: CodeValues, out: Tensor) -> Tensor:
    """Dequantize codes in plain torch, the reference: blocks of rows, rounded once to `out`."""
    (N, K), count = codes.codes.shape, block(out)
    run = 0
    if codes.k_group is not None and count < N * K:  # several blocks: worth a look at the groups
        run, _ = group_runs(codes.k_group, max(K, 1))
        run = 0 if run == 1 or K % run else run
    scales, zeros = codes.scales.float(), None if codes.zeros is None else codes.zeros.float()
    lookup = None if codes.lookup is None else codes.lookup.float()
    for rows, floats in values(codes.codes, lookup, count):
        wide = floats.view(-1, K // run, run) if run else floats
        if zeros is not None:
            wide.sub_(_of_rows(codes, zeros, rows, run))
            _round(floats, codes.rounding)
        scale = _of_rows(codes, scales, rows, run)
        wide = wide.div_(scale) if codes.divide else wide.mul_(scale)
        _round(floats, codes.rounding)
        if codes.factor != 1:
            floats.mul_(codes.factor)
        if codes.row_factors is not None:
            floats.mul_(codes.row_factors[rows])
        if codes.offsets is not None:
            wide.sub_(_of_rows(codes, codes.offsets, rows, run))
            _round(floats, codes.rounding)
        out[rows] = floats
    return out


def _round(floats: Tensor, dtype: DtypeLike | None) -> None:
    """Round floats to a dtype, in place; None: leave them."""
    if dtype is not None:
        floats.copy_(floats.to(TORCH[dtype]))


def _of_rows(codes: CodeValues, of_groups: Tensor, rows: slice, run: int) -> Tensor:
    """Scales or zeros of some rows, one for each code, or one for each `run` of codes."""
    if codes.n_group is not None:
        of_groups = of_groups[codes.n_group[rows]]
    elif of_groups.shape[0] > 1:
        of_groups = of_groups[rows]
    if codes.k_group is None:
        return of_groups
    if run:
        return of_groups[:, : codes.k_group.numel() // run, None]
    return of_groups.gather(1, codes.k_group.expand(of_groups.shape[0], -1))


def _blocks(packing: WordSentence, codes: Tensor, axis: int) -> Iterator[tuple[Tensor, slice]]:
    count = block(codes)
    for at in _cuts(packing, tuple(codes.shape), axis, count):
        yield codes.narrow(axis, at.start, at.stop - at.start), at


def _cuts(packing: WordSentence, shape: tuple[int, ...], axis: int, count: int) -> Iterator[slice]:
    granule, extent = packing.granule(axis), shape[axis]
    step = max(1, count // max(1, shape[1 - axis] * granule)) * granule
    if packing.codes.left[axis][0] in packing.codes.right[-1]:  # a run is not cut
        step = max(1, extent)
    if prod(shape):
        yield from (slice(start, min(start + step, extent)) for start in range(0, extent, step))


def _cut(packing: WordSentence, words: Tensor, shape: tuple[int, ...], axis: int, at: slice) -> Tensor:
    """The words of some rows or columns of codes: an axis a digit, as `stored` has them."""
    size = {**packing.codes.digits(shape, packing.codes.left), "w": packing.words}
    stored, outermost = _stored(packing), packing.codes.left[axis][0]
    apart = words.reshape([size[digit] for digit in stored])
    if outermost not in stored:
        return apart
    granule = packing.granule(axis)
    return apart.narrow(stored.index(outermost), at.start // granule, (at.stop - at.start) // granule)


def _stored(packing: WordSentence) -> list[str]:
    return [digit for group in packing.stored for digit in group]


def _apart(packing: WordSentence, codes: Tensor) -> tuple[Tensor, list[str], Sizes]:
    """Codes with an axis a digit, nothing moved, and the digits' names and sizes."""
    size = packing.codes.digits(tuple(codes.shape), packing.codes.left)
    digits = [digit for group in packing.codes.left for digit in group]
    return codes.reshape([size[digit] for digit in digits]), digits, size


def _neighbours(packing: WordSentence, each: Tensor, digits: list[str]) -> bool:
    """Return whether the codes of a word are neighbours in memory, in its order."""
    if len(packing.codes.right[-1]) > 1 or packing.bits not in WHOLE_BITS or not runs_in_turn(packing):
        return False
    closest = min(
        (step, d) for d, step, size in zip(digits, each.stride(), each.shape, strict=True) if size > 1
    )
    return closest[1] in packing.codes.right[-1]


def _unpack(packing: WordSentence, words: Tensor, codes: Tensor) -> None:
    each, digits, size = _apart(packing, codes)
    stored, run = _stored(packing), packing.codes.right[-1]
    outer = [digit for digit in stored if digit != "w"]
    outer.sort(key=lambda digit: each.stride(digits.index(digit)), reverse=True)
    target = each.permute([digits.index(digit) for digit in (*run, *outer)])
    source = words.permute([stored.index(d) for d in (["w"] if "w" in stored else []) + outer])
    parts = [dense(part) for part in (source if "w" in stored else [source])]
    if _neighbours(packing, each, digits):
        spread = _spread(parts[0], packing.bits).view([size[digit] for digit in (*outer, *run)])
        target.copy_(spread.permute([*range(len(outer), spread.ndim), *range(len(outer))]))
        return
    places = [target[place] for place in product(*(range(size[digit]) for digit in run))]
    part = torch.empty_like(parts[0])  # one for all fields: fresh memory costs more than a shift
    for f in packing.fields:
        torch.bitwise_right_shift(parts[f.word], f.bit, out=part).bitwise_and_(_mask(f.width))
        if f.low:
            places[f.code].bitwise_or_(part.bitwise_left_shift_(f.low))
        else:
            places[f.code].copy_(part)


def _pack(packing: WordSentence, codes: Tensor, words: Tensor) -> None:
    each, digits, size = _apart(packing, codes)
    stored, run = _stored(packing), packing.codes.right[-1]
    outer = [digit for digit in stored if digit != "w"]
    parts = words.unbind(stored.index("w")) if "w" in stored else (words,)
    if _neighbours(packing, each, digits):
        source = each.permute([digits.index(digit) for digit in (*outer, *run)])
        narrow = source.to(torch.uint8, memory_format=torch.contiguous_format)
        parts[0].copy_(_squeezed(narrow, packing.bits))
        return
    source = each.permute([digits.index(digit) for digit in (*run, *outer)])
    places = [source[place] for place in product(*(range(size[digit]) for digit in run))]
    words.zero_()
    part = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    for f in packing.fields:
        if f.width < packing.bits:
            torch.bitwise_right_shift(places[f.code], f.low, out=part).bitwise_and_(_mask(f.width))
            parts[f.word].bitwise_or_(part.bitwise_left_shift_(f.bit))
        else:
            parts[f.word].bitwise_or_(torch.bitwise_left_shift(places[f.code], f.bit, out=part))


def _spread(words: Tensor, bits: int) -> Tensor:
    """Expand words with codes in turn to uint8, one code a byte."""
    if bits == BYTE:
        return words.view(torch.uint8)
    dtype, steps = SPREAD[bits]
    codes = words.view(torch.uint8).to(dtype)
    for up, mask in steps:
        codes = codes.bitwise_or_(codes << up).bitwise_and_(mask)
    return codes.view(torch.uint8)


def _squeezed(codes: Tensor, bits: int) -> Tensor:
    """Invert `_spread`: uint8 codes whose last axis fills a word -> int32, without that axis."""
    if bits != BYTE:
        dtype, steps = SPREAD[bits]
        codes = codes.view(dtype)
        for up, _ in reversed(steps):
            codes = codes.bitwise_or(codes >> up)
        codes = codes.to(torch.uint8)
    return codes.view(torch.int32)[..., 0]


def _mask(width: int) -> int:
    return (1 << width) - 1
