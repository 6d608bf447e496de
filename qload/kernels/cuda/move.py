"""Codes from one packed order to another on a CUDA device."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels.cuda.library import operator
from qload.kernels.cuda.module import check, native, pointer, stream
from qload.layouts import strides
from qload.layouts.packing import Packing


def move(
    source: Tensor,
    bits: int,
    digits: Sequence[strides.Digit],
    shape: Sequence[int],
    *,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A tensor of `shape` and the source's dtype: to[sum digit * to] = from[sum digit * from].

    Strides count elements of `bits` bits. `rows`, int64: where row r starts in `source`; then digits that
    count rows do not count in `source`. What no digit reaches is left as it is in `out`.
    """
    flat = list(chain.from_iterable(digits))
    if out is None:
        made: Tensor = torch.ops.qload.move(source, rows, bits, flat, list(shape))
        return made
    torch.ops.qload.move_out(source, rows, bits, flat, out)
    return out


def reorder(words: Tensor, source: Packing, target: Packing, shape: tuple[int, int]) -> Tensor:
    """Words of codes (K, N) in one packing -> the words of another; exact."""
    digits = strides.digits(strides.places(source.codes, shape), strides.places(target.codes, shape))
    if digits is None or not (strides.moves(source) and strides.moves(target)):
        return target.pack(source.unpack(words))
    return move(words, source.bits, digits, strides.shape_of(target, shape))


def _run(source: Tensor, rows: Tensor | None, bits: int, digits: list[int], out: Tensor) -> None:
    if bits not in strides.NATIVE_BITS:
        raise ArgumentError("bits", f"one of {strides.NATIVE_BITS}", str(bits))
    check("source", source, out)
    check("out", out, source, source.dtype)
    check("rows", rows, source, torch.int64)
    quads = [tuple(digits[i : i + 4]) for i in range(0, len(digits), 4)]
    for name, tensor, side in (("source", source, 1), ("out", out, 2)):
        looked_up = rows is not None and side == 1
        last = sum((d[0] - 1) * d[side] for d in quads if not (looked_up and d[3]))
        if all(d[0] for d in quads) and last >= tensor.numel() * tensor.element_size() * 8 // bits:
            raise ArgumentError(name, f"more than {last} elements of {bits} bits", str(tuple(tensor.shape)))
    if out.data_ptr() % 4:
        raise ArgumentError("out", "memory that starts at a whole word", hex(out.data_ptr()))
    with torch.cuda.device(out.device):
        native().move(bits, quads, pointer(source), pointer(rows), pointer(out), stream(out))


def _move(source: Tensor, rows: Tensor | None, bits: int, digits: list[int], shape: list[int]) -> Tensor:
    out = source.new_empty(shape)
    _run(source, rows, bits, digits, out)
    return out


def _move_fake(source: Tensor, rows: Tensor | None, bits: int, digits: list[int], shape: list[int]) -> Tensor:
    return source.new_empty(shape)


def _out_fake(source: Tensor, rows: Tensor | None, bits: int, digits: list[int], out: Tensor) -> None:
    return None


operator(
    "move", "(Tensor source, Tensor? rows, int bits, int[] digits, int[] shape) -> Tensor", _move, _move_fake
)
operator(
    "move_out", "(Tensor source, Tensor? rows, int bits, int[] digits, Tensor(a!) out) -> ()", _run, _out_fake
)
