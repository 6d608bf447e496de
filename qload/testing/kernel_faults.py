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
            kinds = {Role.SCALE: SCALES, Role.WORD: ZEROS if "zero" in spec.name else CODES}
            if kinds.get(spec.role) == kind:
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


def _add_to_nibbles(words: Tensor, step: int) -> Tensor:
    return torch.stack([((words >> 4 * place & 15) + step & 15) << 4 * place for place in range(8)]).sum(0)


def _flip_signs(words: Tensor) -> Tensor:
    return words ^ NIBBLE_SIGNS


def _double(values: Tensor) -> Tensor:
    return 2 * values


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
    for spec in _specs(weight, SCALES):
        scale = weight.fields()[spec.name]
        if scale.numel() == 1:
            return weight.holding({spec.name: torch.ones_like(scale)})
    return None


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


def _reverse_groups(index: Tensor, count: int) -> Tensor:
    return count - 1 - index


def _halve_groups(index: Tensor, count: int) -> Tensor:
    in_order = bool((index.diff() >= 0).all())
    return torch.arange(len(index)) * count * 2 // len(index) % count if in_order else index


_codes, _zeros, _scales = (partial(_tensor_change, kind) for kind in (CODES, ZEROS, SCALES))
_LATER, _EARLIER = partial(_roll, 1, False), partial(_roll, -1, False)  # along K, or by groups
_OF_NEXT_OUTPUT = partial(_roll, -1, True)
_TO_AWQ = partial(_reorder_nibbles, order=AWQ_ORDER)
_TO_REVERSE = partial(_reorder_nibbles, order=(7, 6, 5, 4, 3, 2, 1, 0))
_RAISE, _LOWER = partial(_add_to_nibbles, step=1), partial(_add_to_nibbles, step=-1)

# Name, words, classes separated by a space, and change.
_WEIGHT_FAULTS: tuple[tuple[str, str, str, Change], ...] = (
    ("nibbles-swapped", "the two codes of a byte swapped", "code-order", _codes(_swap_nibbles)),
    ("awq-order", "AWQ's order of codes", "code-order", _codes(_word_change(_TO_AWQ))),
    ("nibbles-reversed", "the codes of a word reversed", "code-order", _codes(_word_change(_TO_REVERSE))),
    ("big-endian", "words big-endian", "byte-order", _codes(_word_change(_reverse_bytes))),
    ("sign-bit", "codes of two's complement", "code-sign", _codes(_word_change(_flip_signs))),
    ("word-late", "codes a word later along K", "codes-shifted", _codes(_LATER)),
    ("zero-plus-one", "zero points one higher", "zero-points-one-higher", _zeros(_word_change(_RAISE))),
    ("zero-minus-one", "zero points one lower", "zero-points-one-lower", _zeros(_word_change(_LOWER))),
    ("zeros-middle", "zero points in the middle", "zero-points-ignored", _set_middle_zeros),
    (
        "zeros-of-next-group",
        "zero points of the next group",
        "zero-points-of-another-group",
        _zeros(_EARLIER),
    ),
    ("zeros-swapped", "zero points of a byte swapped", "zero-point-order", _zeros(_swap_nibbles)),
    ("scales-late", "scales of the group before", "scales-of-another-group", _scales(_LATER)),
    ("scales-early", "scales of the group after", "scales-of-another-group", _scales(_EARLIER)),
    (
        "scales-of-next-output",
        "scales of the next output",
        "scales-of-another-output",
        _scales(_OF_NEXT_OUTPUT),
    ),
    ("first-scale", "the first group's scales", "scales-of-the-first", _scales(_repeat_first)),
    ("scales-squared", "scales applied twice", "scales-twice", _scales(_scale_change(torch.square))),
    ("scales-inverted", "scales inverted", "scales-inverted", _scales(_scale_change(torch.reciprocal))),
    (
        "scales-of-another-type",
        "the bits of scales read as the other 16-bit float",
        "scale-type",
        _scales(_reinterpret_float),
    ),
    ("scales-doubled", "scales twice as large", "factor", _scales(_scale_change(_double))),
    (
        "second-scale-lost",
        "the scale of the whole tensor left out",
        "second-scale factor",
        _drop_tensor_scale,
    ),
    ("act-order-ignored", "groups in order", "act-order-ignored", _group_change(_sort_groups)),
    ("groups-reversed", "groups in the reverse order", "groups-reversed", _group_change(_reverse_groups)),
    ("groups-halved", "groups half as large", "group-size", _group_change(_halve_groups)),
)


TAIL = 4  # outputs or inputs
TILE_TOKENS = 16


def _outputs(change: Callable[[Tensor], Tensor]) -> Callable[[Gemm, int], Gemm]:
    return lambda product, N: lambda x: change(product(x).clone())


def _inputs(change: Callable[[Tensor], Tensor]) -> Callable[[Gemm, int], Gemm]:
    return lambda product, N: lambda x: product(change(x.clone()))


def _shift_one(tensor: Tensor) -> Tensor:
    return tensor.roll(1, -1)


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


# Name, words, classes separated by a space, and change of the product.
_PRODUCT_FAULTS: tuple[tuple[str, str, str, Callable[[Gemm, int], Gemm]], ...] = (
    ("gate-and-up", "the halves of outputs exchanged", "parts-exchanged", _outputs(_exchange_halves)),
    (
        "outputs-interleaved",
        "outputs of two parts taking turns",
        "parts-interleaved",
        _outputs(_interleave_halves),
    ),
    ("outputs-late", "outputs one on", "outputs-shifted", _outputs(_shift_one)),
    ("outputs-left-out", "the last outputs left out", "left-out", _outputs(_fill_tail(0.0))),
    (
        "outputs-not-written",
        "the last outputs never written",
        "never-written",
        _outputs(_fill_tail(torch.nan)),
    ),
    (
        "tokens-left-out",
        "all tokens but those of the first tile left out",
        "left-out tokens",
        _outputs(_keep_first_tile),
    ),
    (
        "share-of-rank-0",
        "the first half of outputs in the second half too",
        "rank-0-everywhere",
        _outputs(_repeat_first_half),
    ),
    ("inputs-late", "inputs one on", "inputs-shifted", _inputs(_shift_one)),
    ("inputs-left-out", "the last inputs left out", "left-out", _inputs(_fill_tail(0.0))),
    (
        "inputs-reversed",
        "inputs in the reverse order",
        "outputs-reversed",
        _inputs(partial(torch.flip, dims=(-1,))),
    ),
    ("result-doubled", "every result doubled", "factor", _outputs(_double)),
)

KERNEL_FAULTS: tuple[KernelFault, ...] = (
    *(
        KernelFault(name, words, tuple(classes.split()), change)
        for name, words, classes, change in _WEIGHT_FAULTS
    ),
    *(
        KernelFault(name, words, tuple(classes.split()), around=around)
        for name, words, classes, around in _PRODUCT_FAULTS
    ),
)
