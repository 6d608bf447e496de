"""Rows of a quantized matrix: an embedding that dequantizes the rows of its ids.

    ids (...)  ->  the blocks of rows that have them  ->  their tensors, by the declared axes  ->  (..., K)

A block is the smallest number of rows with tensors of its own: 1 for rows with scales of their own, 128 for
FP8 in blocks. A format whose tensors cannot be cut between rows is dequantized as a whole for each call.
"""

from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import Any, Self

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError
from qload.experts.folding import has_stored_axes, joined_axis
from qload.kernels.chips import uncast
from qload.spec import PARTS, TensorSpec, Weight

RUN_BYTES = 64 << 20  # of rows that are dequantized at once


class QuantizedRows(nn.Module):
    """Rows of a typed weight (N, K) as a module: ids (...) -> (..., K).

    Parameters
    ----------
    weight
        The weight; its tensors are this module's buffers.
    """

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self._blueprint = weight
        for name, tensor in weight.fields().items():
            self.register_buffer(name, tensor)

    @property
    def typed(self) -> Weight:
        """The weight, over this module's buffers."""
        return self._blueprint.holding({name: self.get_buffer(name) for name in self._blueprint.fields()})

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantize the rows of `ids`, integers below N, to a `dtype`; ArgumentError for other ids."""
        weight = self.typed
        rows, places = torch.unique(ids.reshape(-1), return_inverse=True)
        return dequantize_rows(weight, rows, dtype)[places].reshape(*ids.shape, weight.layer.K)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow a move to another device, and no cast."""
        super()._apply(uncast(fn), recurse)  # type: ignore[no-untyped-call]
        self._blueprint = self.typed
        return self

    def extra_repr(self) -> str:
        """Shape, format and config."""
        own = self._blueprint
        return f"{own.layer.N}, {own.layer.K}, {own.format}, {own.config}"


def dequantize_rows(weight: Weight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize the `rows` (R,), in ascending order, of a weight (N, K): (R, K).

    ArgumentError for a row below 0 or of N or more.
    """
    N, K = weight.shape
    if rows.numel() and not 0 <= int(rows[0]) <= int(rows[-1]) < N:
        wrong = rows[0] if int(rows[0]) < 0 else rows[-1]
        raise ArgumentError(f"{weight.layer.name or 'embedding'}: ids", f"0 to {N - 1}", str(int(wrong)))
    size = block_rows(weight)
    if size == 0:
        return weight.dequantize(dtype)[rows]
    result = torch.empty((len(rows), K), dtype=dtype, device=weight.device)
    blocks, block_of = torch.unique_consecutive(rows // size, return_inverse=True)
    step, at = max(1, RUN_BYTES // (4 * size * K)), 0
    for start in range(0, len(blocks), step):
        run = blocks[start : start + step]
        stop = int(torch.searchsorted(block_of, start + len(run)))
        places = (block_of[at:stop] - start) * size + rows[at:stop] % size
        result[at:stop] = _select_blocks(weight, run, size).dequantize(dtype)[places]
        at = stop
    return result


def block_rows(weight: Weight) -> int:
    """Smallest number of rows with tensors of their own; 0 if a tensor cannot be cut between rows."""
    sizes = {"N": weight.layer.N, "K": weight.layer.K}
    steps = [1]
    for spec in _specs(weight):
        axis = joined_axis(spec)
        if axis is None:
            is_of_inputs = all(each.dim == "K" or each.dim.isdigit() for each in spec.axes)
            steps.append(1 if is_of_inputs and has_stored_axes(spec) else 0)
        elif spec.axes[axis].dim == PARTS:
            steps.append(1 if len(weight.layer.parts) == 1 else 0)
        else:
            steps.append(spec.axes[axis].step("N", sizes) if has_stored_axes(spec) else 0)
    return lcm(*steps) if all(steps) else 0


def _specs(weight: Weight) -> list[TensorSpec]:
    fields = weight.fields()
    return [spec for spec in weight.tensors(weight.config) if spec.name in fields]


def _select_blocks(weight: Weight, blocks: Tensor, size: int) -> Weight:
    """Weight of some blocks of rows; rows beyond the last of the weight repeat stored entries."""
    N, K = weight.shape
    tensors: dict[str, Any] = weight.fields()
    for spec in _specs(weight):
        number = joined_axis(spec)
        if number is None or spec.axes[number].dim == PARTS:
            continue
        axis, tensor = spec.axes[number], tensors[spec.name]
        entries = axis.at(size * (K if axis.flat else 1), N * (K if axis.flat else 1))
        index = blocks[:, None] * entries + torch.arange(entries, device=blocks.device)
        index = index.flatten().clamp(max=tensor.shape[number] - 1)
        stored = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        tensors[spec.name] = stored.index_select(number, index).view(tensor.dtype)
    rows = len(blocks) * size
    layer = replace(weight.layer, parts=(rows,), whole=(rows, K))
    return type(weight).unchecked(weight.config, layer, tensors)
