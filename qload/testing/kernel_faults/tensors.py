"""Faults of packing: words, scales, zero points and groups changed where they are stored.

They are written from the stored tensors alone and share no line with `qload.diagnosis`, which names them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qload.spec import Role, TensorSpec, Weight
from qload.testing.kernel_faults.fault import Change, KernelFault

CODES, ZEROS, SCALES = "codes", "zeros", "scales"
EVEN, ODD = 0x0F0F0F0F, 0xF0F0F0F0
ONES, HIGH = 0x11111111, 0x88888888
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def _specs(weight: Weight, kind: str) -> Iterator[TensorSpec]:
    for spec in weight.tensors(weight.config):
        if spec.name in weight.fields():
            zeros = "zero" in spec.name
            if (spec.role is Role.SCALE and kind == SCALES) or (
                spec.role is Role.WORD and kind == (ZEROS if zeros else CODES)
            ):
                yield spec


def _tensor(kind: str, change: Callable[[Tensor, TensorSpec], Tensor | None]) -> Change:
    """A change of the first tensor of a kind."""

    def made(weight: Weight) -> Weight | None:
        spec = next(_specs(weight, kind), None)
        changed = None if spec is None else change(weight.fields()[spec.name], spec)
        return None if changed is None or spec is None else weight.holding({spec.name: changed})

    return made


def _words(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, TensorSpec], Tensor | None]:
    """A change of int32 words, as unsigned numbers."""

    def made(words: Tensor, spec: TensorSpec) -> Tensor | None:
        if words.dtype != torch.int32:
            return None
        changed = change(words.long() & 0xFFFFFFFF) & 0xFFFFFFFF
        return torch.where(changed >= 2**31, changed - 2**32, changed).int()

    return made


def _swapped(words: Tensor, spec: TensorSpec) -> Tensor | None:
    if words.dtype == torch.uint8:
        return words >> 4 | words << 4
    return _words(lambda wide: (wide & EVEN) << 4 | (wide & ODD) >> 4)(words, spec)


def _reordered(words: Tensor, order: tuple[int, ...]) -> Tensor:
    nibbles = [words >> 4 * place & 15 for place in order]
    return torch.stack([nibble << 4 * place for place, nibble in enumerate(nibbles)]).sum(0)


def _big_endian(words: Tensor) -> Tensor:
    return (words & 0xFF) << 24 | (words & 0xFF00) << 8 | words >> 8 & 0xFF00 | words >> 24


def _each_nibble(words: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.stack([(change(words >> 4 * place & 15) & 15) << 4 * place for place in range(8)]).sum(0)


def _axis(spec: TensorSpec, outputs: bool) -> int | None:
    """Which axis counts outputs, or else the other one of two."""
    if len(spec.axes) != 2:
        return None
    along = next((place for place, axis in enumerate(spec.axes) if axis.follows("N")), None)
    return along if along is None or outputs else 1 - along


def _rolled(step: int, outputs: bool, tensor: Tensor, spec: TensorSpec) -> Tensor | None:
    axis = _axis(spec, outputs)
    if axis is None or tensor.shape[axis] < 2:
        return None
    return tensor.index_select(axis, (torch.arange(tensor.shape[axis]) - step) % tensor.shape[axis])


def _first(scales: Tensor, spec: TensorSpec) -> Tensor | None:
    axis = _axis(spec, outputs=False)
    if axis is None or scales.shape[axis] < 2:
        return None
    return scales.index_select(axis, torch.zeros(scales.shape[axis], dtype=torch.int64))


def _floats(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, TensorSpec], Tensor | None]:
    """A change of 16-bit or wider scales, in float32."""

    def made(scales: Tensor, spec: TensorSpec) -> Tensor | None:
        wide = scales.is_floating_point() and scales.element_size() > 1
        return change(scales.float()) if wide else None

    return made


def _other_half(scales: Tensor, spec: TensorSpec) -> Tensor | None:
    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}.get(scales.dtype)
    return None if other is None else scales.view(other)


def _middle(weight: Weight) -> Weight | None:
    """Every zero point 8; GPTQ stores 7 for that."""
    stored = HIGH - ONES * (weight.format == "gptq")
    return _tensor(ZEROS, _words(lambda wide: torch.full_like(wide, stored)))(weight)


def _second(weight: Weight) -> Weight | None:
    """The scale of the whole tensor left out."""
    scalars = [spec.name for spec in _specs(weight, SCALES) if weight.fields()[spec.name].numel() == 1]
    return (
        weight.holding({name: torch.ones_like(weight.fields()[name]) for name in scalars[:1]})
        if scalars
        else None
    )


def _groups(change: Callable[[Tensor, int], Tensor]) -> Change:
    """A change of the group of each input, where it is stored."""

    def made(weight: Weight) -> Weight | None:
        index: Any = weight.fields().get("g_idx", weight.fields().get("weight_g_idx"))
        if index is None or not index.numel() or int(index.max()) < 1:
            return None
        name = "g_idx" if "g_idx" in weight.fields() else "weight_g_idx"
        return weight.holding({name: change(index, int(index.max()) + 1).to(index.dtype)})

    return made


def _in_order(index: Tensor, count: int) -> Tensor:
    return torch.arange(len(index)) * count // len(index)


def _halved(index: Tensor, count: int) -> Tensor:
    return (
        torch.arange(len(index)) * count * 2 // len(index) % count
        if bool((index.diff() >= 0).all())
        else index
    )


_ORDER, _GROUP, _OUTPUT = ("code-order",), ("scales-of-another-group",), ("scales-of-another-output",)
_LATE = ("codes-shifted",)

FAULTS = (
    KernelFault("nibbles-swapped", "the two codes of a byte swapped", _ORDER, _tensor(CODES, _swapped)),
    KernelFault(
        "awq-order", "AWQ's order of codes", _ORDER, _tensor(CODES, _words(partial(_reordered, order=AWQ)))
    ),
    KernelFault(
        "nibbles-reversed",
        "the codes of a word reversed",
        _ORDER,
        _tensor(CODES, _words(partial(_reordered, order=(7, 6, 5, 4, 3, 2, 1, 0)))),
    ),
    KernelFault("big-endian", "words big-endian", ("byte-order",), _tensor(CODES, _words(_big_endian))),
    KernelFault(
        "sign-bit",
        "codes of two's complement",
        ("code-sign",),
        _tensor(CODES, _words(lambda wide: wide ^ HIGH)),
    ),
    KernelFault("word-late", "codes a word later along K", _LATE, _tensor(CODES, partial(_rolled, 1, False))),
    KernelFault(
        "zero-plus-one",
        "zero points one higher",
        ("zero-points-one-higher",),
        _tensor(ZEROS, _words(lambda wide: _each_nibble(wide, lambda zero: zero + 1))),
    ),
    KernelFault(
        "zero-minus-one",
        "zero points one lower",
        ("zero-points-one-lower",),
        _tensor(ZEROS, _words(lambda wide: _each_nibble(wide, lambda zero: zero - 1))),
    ),
    KernelFault(
        "zeros-middle",
        "zero points in the middle",
        ("zero-points-ignored",),
        _middle,
    ),
    KernelFault(
        "zeros-of-next-group",
        "zero points of the next group",
        ("zero-points-of-another-group",),
        _tensor(ZEROS, partial(_rolled, -1, False)),
    ),
    KernelFault(
        "zeros-swapped",
        "zero points of a byte swapped",
        ("zero-point-order",),
        _tensor(ZEROS, _swapped),
    ),
    KernelFault(
        "scales-late", "scales of the group before", _GROUP, _tensor(SCALES, partial(_rolled, 1, False))
    ),
    KernelFault(
        "scales-early", "scales of the group after", _GROUP, _tensor(SCALES, partial(_rolled, -1, False))
    ),
    KernelFault(
        "scales-of-next-output",
        "scales of the next output",
        _OUTPUT,
        _tensor(SCALES, partial(_rolled, -1, True)),
    ),
    KernelFault("first-scale", "the first group's scales", ("scales-of-the-first",), _tensor(SCALES, _first)),
    KernelFault(
        "scales-squared", "scales applied twice", ("scales-twice",), _tensor(SCALES, _floats(torch.square))
    ),
    KernelFault(
        "scales-inverted", "scales inverted", ("scales-inverted",), _tensor(SCALES, _floats(torch.reciprocal))
    ),
    KernelFault(
        "scales-of-another-type",
        "the bits of scales read as the other 16-bit float",
        ("scale-type",),
        _tensor(SCALES, _other_half),
    ),
    KernelFault(
        "scales-doubled",
        "scales twice as large",
        ("factor",),
        _tensor(SCALES, _floats(lambda scales: 2 * scales)),
    ),
    KernelFault(
        "second-scale-lost", "the scale of the whole tensor left out", ("second-scale", "factor"), _second
    ),
    KernelFault("act-order-ignored", "groups in order", ("act-order-ignored",), _groups(_in_order)),
    KernelFault(
        "groups-reversed",
        "groups in the reverse order",
        ("groups-reversed",),
        _groups(lambda index, count: count - 1 - index),
    ),
    KernelFault("groups-halved", "groups half as large", ("group-size",), _groups(_halved)),
)
