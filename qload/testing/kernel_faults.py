"""Faults of kernels and packers: changes of the tensors of a weight, or of the operands of a product.

Changes of tensors follow from their declarations alone and share no code with `qload.diagnosis`, which names
the faults.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qload.spec import Role, TensorSpec, Weight

Change = Callable[[Weight], Weight | None]
Gemm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class KernelFault:
    """A fault to plant in a kernel: a changed weight or a changed product.

    Attributes
    ----------
    name, words
        The id and a description.
    classes
        The ids of `qload.diagnosis` that name the fault correctly.
    change
        Function of a weight that returns the faulty one, or None without a tensor to change; None for a fault
        of the product.
    around
        Function of a product x (M, K) -> y (M, N) and its number of outputs that returns the faulty product;
        None for a fault of the weight.
    """

    name: str
    words: str
    classes: tuple[str, ...]
    change: Change | None = None
    around: Callable[[Gemm, int], Gemm] | None = None

    def packed(self, weight: Weight) -> Weight | None:
        """Return the faulty weight in place of `weight`; None if the fault changes none of its numbers."""
        if self.change is None:
            return weight
        changed = self.change(weight)
        if changed is None or _equal(changed, weight):
            return None
        return changed

    def gemm(self, product: Gemm, N: int) -> Gemm:
        """Return the faulty `product` with `N` outputs."""
        return product if self.around is None else self.around(product, N)


def _equal(one: Weight, other: Weight) -> bool:
    return torch.equal(one.dequantize().nan_to_num(), other.dequantize().nan_to_num())


CODES, ZEROS, SCALES = "codes", "zeros", "scales"  # kinds of tensors
LOW_NIBBLES, HIGH_NIBBLES = 0x0F0F0F0F, 0xF0F0F0F0
NIBBLE_ONES, NIBBLE_SIGNS = 0x11111111, 0x88888888
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _specs(weight: Weight, kind: str) -> Iterator[TensorSpec]:
    for spec in weight.tensors(weight.config):
        if spec.name in weight.fields():
            zeros = "zero" in spec.name
            if (spec.role is Role.SCALE and kind == SCALES) or (
                spec.role is Role.WORD and kind == (ZEROS if zeros else CODES)
            ):
                yield spec


def _tensor_change(kind: str, change: Callable[[Tensor, TensorSpec], Tensor | None]) -> Change:
    """A change of the first tensor of a kind: codes, zero points or scales."""

    def apply(weight: Weight) -> Weight | None:
        spec = next(_specs(weight, kind), None)
        changed = None if spec is None else change(weight.fields()[spec.name], spec)
        return None if changed is None or spec is None else weight.holding({spec.name: changed})

    return apply


def _word_change(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, TensorSpec], Tensor | None]:
    """A change of int32 words, computed on unsigned numbers in int64."""

    def apply(words: Tensor, spec: TensorSpec) -> Tensor | None:
        if words.dtype != torch.int32:
            return None
        changed = change(words.long() & 0xFFFFFFFF) & 0xFFFFFFFF
        return torch.where(changed >= 2**31, changed - 2**32, changed).int()

    return apply


def _swap_nibbles(words: Tensor, spec: TensorSpec) -> Tensor | None:
    if words.dtype == torch.uint8:
        return words >> 4 | words << 4
    return _word_change(lambda wide: (wide & LOW_NIBBLES) << 4 | (wide & HIGH_NIBBLES) >> 4)(words, spec)


def _reorder_nibbles(words: Tensor, order: tuple[int, ...]) -> Tensor:
    nibbles = [words >> 4 * place & 15 for place in order]
    return torch.stack([nibble << 4 * place for place, nibble in enumerate(nibbles)]).sum(0)


def _reverse_bytes(words: Tensor) -> Tensor:
    return (words & 0xFF) << 24 | (words & 0xFF00) << 8 | words >> 8 & 0xFF00 | words >> 24


def _map_nibbles(words: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.stack([(change(words >> 4 * place & 15) & 15) << 4 * place for place in range(8)]).sum(0)


def _axis(spec: TensorSpec, outputs: bool) -> int | None:
    """The axis of outputs of a matrix, or with `outputs=False` its other axis; None if there is none."""
    if len(spec.axes) != 2:
        return None
    along = next((place for place, axis in enumerate(spec.axes) if axis.follows("N")), None)
    return along if along is None or outputs else 1 - along


def _roll(step: int, outputs: bool, tensor: Tensor, spec: TensorSpec) -> Tensor | None:
    axis = _axis(spec, outputs)
    if axis is None or tensor.shape[axis] < 2:
        return None
    return tensor.index_select(axis, (torch.arange(tensor.shape[axis]) - step) % tensor.shape[axis])


def _repeat_first(scales: Tensor, spec: TensorSpec) -> Tensor | None:
    axis = _axis(spec, outputs=False)
    if axis is None or scales.shape[axis] < 2:
        return None
    return scales.index_select(axis, torch.zeros(scales.shape[axis], dtype=torch.int64))


def _scale_change(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, TensorSpec], Tensor | None]:
    """A change of scales of 16 bits or more, computed in float32."""

    def apply(scales: Tensor, spec: TensorSpec) -> Tensor | None:
        wide = scales.is_floating_point() and scales.element_size() > 1
        return change(scales.float()) if wide else None

    return apply


def _reinterpret_float(scales: Tensor, spec: TensorSpec) -> Tensor | None:
    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}.get(scales.dtype)
    return None if other is None else scales.view(other)


def _set_middle_zeros(weight: Weight) -> Weight | None:
    """Set every zero point to 8, which GPTQ stores as 7."""
    stored = NIBBLE_SIGNS - NIBBLE_ONES * (weight.format == "gptq")
    return _tensor_change(ZEROS, _word_change(lambda wide: torch.full_like(wide, stored)))(weight)


def _drop_tensor_scale(weight: Weight) -> Weight | None:
    """Set the scale of the whole tensor to 1."""
    scalars = [spec.name for spec in _specs(weight, SCALES) if weight.fields()[spec.name].numel() == 1]
    return (
        weight.holding({name: torch.ones_like(weight.fields()[name]) for name in scalars[:1]})
        if scalars
        else None
    )


def _group_change(change: Callable[[Tensor, int], Tensor]) -> Change:
    """A change of the stored group of each input, given the number of groups."""

    def apply(weight: Weight) -> Weight | None:
        index: Any = weight.fields().get("g_idx", weight.fields().get("weight_g_idx"))
        if index is None or not index.numel() or int(index.max()) < 1:
            return None
        name = "g_idx" if "g_idx" in weight.fields() else "weight_g_idx"
        return weight.holding({name: change(index, int(index.max()) + 1).to(index.dtype)})

    return apply


def _sort_groups(index: Tensor, count: int) -> Tensor:
    return torch.arange(len(index)) * count // len(index)


def _halve_groups(index: Tensor, count: int) -> Tensor:
    return (
        torch.arange(len(index)) * count * 2 // len(index) % count
        if bool((index.diff() >= 0).all())
        else index
    )


_ORDER, _GROUP, _OUTPUT = ("code-order",), ("scales-of-another-group",), ("scales-of-another-output",)
_LATE = ("codes-shifted",)

WEIGHT_FAULTS = (
    KernelFault(
        "nibbles-swapped", "the two codes of a byte swapped", _ORDER, _tensor_change(CODES, _swap_nibbles)
    ),
    KernelFault(
        "awq-order",
        "AWQ's order of codes",
        _ORDER,
        _tensor_change(CODES, _word_change(partial(_reorder_nibbles, order=AWQ_ORDER))),
    ),
    KernelFault(
        "nibbles-reversed",
        "the codes of a word reversed",
        _ORDER,
        _tensor_change(CODES, _word_change(partial(_reorder_nibbles, order=(7, 6, 5, 4, 3, 2, 1, 0)))),
    ),
    KernelFault(
        "big-endian", "words big-endian", ("byte-order",), _tensor_change(CODES, _word_change(_reverse_bytes))
    ),
    KernelFault(
        "sign-bit",
        "codes of two's complement",
        ("code-sign",),
        _tensor_change(CODES, _word_change(lambda wide: wide ^ NIBBLE_SIGNS)),
    ),
    KernelFault(
        "word-late", "codes a word later along K", _LATE, _tensor_change(CODES, partial(_roll, 1, False))
    ),
    KernelFault(
        "zero-plus-one",
        "zero points one higher",
        ("zero-points-one-higher",),
        _tensor_change(ZEROS, _word_change(lambda wide: _map_nibbles(wide, lambda zero: zero + 1))),
    ),
    KernelFault(
        "zero-minus-one",
        "zero points one lower",
        ("zero-points-one-lower",),
        _tensor_change(ZEROS, _word_change(lambda wide: _map_nibbles(wide, lambda zero: zero - 1))),
    ),
    KernelFault(
        "zeros-middle",
        "zero points in the middle",
        ("zero-points-ignored",),
        _set_middle_zeros,
    ),
    KernelFault(
        "zeros-of-next-group",
        "zero points of the next group",
        ("zero-points-of-another-group",),
        _tensor_change(ZEROS, partial(_roll, -1, False)),
    ),
    KernelFault(
        "zeros-swapped",
        "zero points of a byte swapped",
        ("zero-point-order",),
        _tensor_change(ZEROS, _swap_nibbles),
    ),
    KernelFault(
        "scales-late", "scales of the group before", _GROUP, _tensor_change(SCALES, partial(_roll, 1, False))
    ),
    KernelFault(
        "scales-early", "scales of the group after", _GROUP, _tensor_change(SCALES, partial(_roll, -1, False))
    ),
    KernelFault(
        "scales-of-next-output",
        "scales of the next output",
        _OUTPUT,
        _tensor_change(SCALES, partial(_roll, -1, True)),
    ),
    KernelFault(
        "first-scale",
        "the first group's scales",
        ("scales-of-the-first",),
        _tensor_change(SCALES, _repeat_first),
    ),
    KernelFault(
        "scales-squared",
        "scales applied twice",
        ("scales-twice",),
        _tensor_change(SCALES, _scale_change(torch.square)),
    ),
    KernelFault(
        "scales-inverted",
        "scales inverted",
        ("scales-inverted",),
        _tensor_change(SCALES, _scale_change(torch.reciprocal)),
    ),
    KernelFault(
        "scales-of-another-type",
        "the bits of scales read as the other 16-bit float",
        ("scale-type",),
        _tensor_change(SCALES, _reinterpret_float),
    ),
    KernelFault(
        "scales-doubled",
        "scales twice as large",
        ("factor",),
        _tensor_change(SCALES, _scale_change(lambda scales: 2 * scales)),
    ),
    KernelFault(
        "second-scale-lost",
        "the scale of the whole tensor left out",
        ("second-scale", "factor"),
        _drop_tensor_scale,
    ),
    KernelFault("act-order-ignored", "groups in order", ("act-order-ignored",), _group_change(_sort_groups)),
    KernelFault(
        "groups-reversed",
        "groups in the reverse order",
        ("groups-reversed",),
        _group_change(lambda index, count: count - 1 - index),
    ),
    KernelFault("groups-halved", "groups half as large", ("group-size",), _group_change(_halve_groups)),
)


TAIL = 4  # outputs or inputs
TILE_TOKENS = 16


def _output_change(change: Callable[[Tensor], Tensor]) -> Callable[[Gemm, int], Gemm]:
    return lambda product, N: lambda x: change(product(x).clone())


def _input_change(change: Callable[[Tensor], Tensor]) -> Callable[[Gemm, int], Gemm]:
    return lambda product, N: lambda x: product(change(x.clone()))


def _exchange_halves(y: Tensor) -> Tensor:
    return y.roll(y.shape[-1] // 2, -1)


def _interleave_halves(y: Tensor) -> Tensor:
    if y.shape[-1] % 2:
        return y
    return y.reshape(*y.shape[:-1], 2, -1).transpose(-1, -2).reshape(y.shape)


def _fill_tail(value: float) -> Callable[[Tensor], Tensor]:
    def apply(tensor: Tensor) -> Tensor:
        tensor[..., -TAIL:] = value
        return tensor

    return apply


def _keep_first_tile(y: Tensor) -> Tensor:
    y[TILE_TOKENS:] = 0
    return y


def _repeat_first_half(y: Tensor) -> Tensor:
    half = y.shape[-1] // 2
    y[..., half : 2 * half] = y[..., :half]
    return y


PRODUCT_FAULTS = (
    KernelFault(
        "gate-and-up",
        "the halves of outputs exchanged",
        ("parts-exchanged",),
        around=_output_change(_exchange_halves),
    ),
    KernelFault(
        "outputs-interleaved",
        "outputs of two parts taking turns",
        ("parts-interleaved",),
        around=_output_change(_interleave_halves),
    ),
    KernelFault(
        "outputs-late", "outputs one on", ("outputs-shifted",), around=_output_change(lambda y: y.roll(1, -1))
    ),
    KernelFault(
        "outputs-left-out", "the last outputs left out", ("left-out",), around=_output_change(_fill_tail(0.0))
    ),
    KernelFault(
        "outputs-not-written",
        "the last outputs never written",
        ("never-written",),
        around=_output_change(_fill_tail(torch.nan)),
    ),
    KernelFault(
        "tokens-left-out",
        "all tokens but those of the first tile left out",
        ("left-out",),
        around=_output_change(_keep_first_tile),
    ),
    KernelFault(
        "share-of-rank-0",
        "the first half of outputs in the second half too",
        ("rank-0-everywhere",),
        around=_output_change(_repeat_first_half),
    ),
    KernelFault(
        "inputs-late", "inputs one on", ("inputs-shifted",), around=_input_change(lambda x: x.roll(1, -1))
    ),
    KernelFault(
        "inputs-left-out", "the last inputs left out", ("left-out",), around=_input_change(_fill_tail(0.0))
    ),
    KernelFault(
        "inputs-reversed",
        "inputs in the reverse order",
        ("outputs-reversed",),
        around=_input_change(lambda x: x.flip(-1)),
    ),
    KernelFault(
        "result-doubled", "every result doubled", ("factor",), around=_output_change(lambda y: 2 * y)
    ),
)

KERNEL_FAULTS: tuple[KernelFault, ...] = (*WEIGHT_FAULTS, *PRODUCT_FAULTS)
