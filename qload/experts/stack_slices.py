"""`Slot`: the place of one tensor of each expert in a tensor of all experts.

stored, inputs first, interleaved        of expert e, gate: first 0, step 2, inputs first
(E, K, 2 N)                              (N, K) = stored[e, :, 0::2].T
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qload.errors import MismatchError
from qload.layouts import Order
from qload.storage import TensorInfo
from qload.storage.file_reads import GAP

TURNED = Order("k n -> n k")
WINDOW_BYTES = 8 << 20  # of whole rows, read at once for some of their columns

Bounds = tuple[tuple[int, int], ...]
Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor of each expert.

    Attributes
    ----------
    source
        The name of the stored tensor.
    info
        Dtype and shape of one expert's tensor, and the file of the stored one.
    counted
        Whether the first stored axis is that of experts; if not, all experts share the tensor.
    first
        Index of its first output among the joined outputs; 0 or 1 if they are interleaved.
    step
        Distance of its outputs: 2 where gate and up are interleaved.
    inputs_first
        Whether the stored axes are (inputs, outputs).
    bytes_of_block
        Bytes along the inputs with an axis of their own, 16 for MXFP4; 0: none.
    layers_of_shape
        Number of layers with the N outputs of a stored shape [E, N, K] or [N, K]; 0: it is no shape.
    experts
        E expected in a stored shape.
    lacks_axis
        Whether the last axis, of length 1, is not stored.
    """

    source: str
    info: TensorInfo
    counted: bool = True
    first: int = 0
    step: int = 1
    inputs_first: bool = False
    bytes_of_block: int = 0
    layers_of_shape: int = 0
    experts: int = 0
    lacks_axis: bool = False

    def stored(self, expert: int, pairs: Bounds) -> Slices:
        """Slices to read for the elements `pairs` of an expert's tensor, with both of interleaved layers."""
        slices = [slice(*pair) for pair in pairs]
        if self.layers_of_shape:
            return (slice(expert, expert + 1),) if self.counted else ()
        if self.lacks_axis:
            slices.pop()
        if slices and self.step > 1:
            slices[0] = slice(self.step * pairs[0][0], self.step * pairs[0][1])
        elif slices:
            slices[0] = slice(self.first + pairs[0][0], self.first + pairs[0][1])
        if self.bytes_of_block:
            start, stop = pairs[1]
            slices[1] = slice(start // self.bytes_of_block, -(-stop // self.bytes_of_block))
        if self.inputs_first:
            slices.reverse()
        return (slice(expert, expert + 1), *slices) if self.counted else tuple(slices)

    def arranged(self, block: Tensor, pairs: Bounds) -> Tensor:
        """Copy what was read for the elements `pairs` into the layout of one expert's tensor."""
        if self.layers_of_shape:
            return self._shape(block)[slice(*pairs[0])].clone()
        stored = block[0] if self.counted else block
        if self.step > 1:
            turns = slice(self.first, None, self.step)
            stored = stored[:, turns] if self.inputs_first else stored[turns]
        if self.inputs_first:
            return TURNED.apply(stored.contiguous())
        if self.bytes_of_block:
            stored = self._of_blocks(stored, pairs[1])
        return stored.reshape(extents(pairs)).clone(memory_format=torch.contiguous_format)

    def _of_blocks(self, stored: Tensor, inputs: tuple[int, int]) -> Tensor:
        start = inputs[0] % self.bytes_of_block
        return stored.flatten(1)[:, start : start + inputs[1] - inputs[0]]

    def _shape(self, stored: Tensor) -> Tensor:
        """[N, K] of one layer; MismatchError if the stored shape contradicts E or N."""
        values = stored.flatten().tolist()
        outputs, inputs = values[-2:]
        if values[:-2] not in ([], [self.experts]) or outputs % self.layers_of_shape:
            expected = f"[{self.experts}, N, K], N of {self.layers_of_shape} layers of one size"
            raise MismatchError(self.source, "not the shape of these experts", expected, str(values))
        return torch.tensor([outputs // self.layers_of_shape, inputs], dtype=stored.dtype)


def widened(stored: Slices, info: TensorInfo) -> Slices:
    """Widen a slice of few columns of long rows: otherwise each row would be a read of its own."""
    rows, columns, size = stored[-2], stored[-1], info.dtype.itemsize
    wanted, row = columns.stop - columns.start, info.shape[-1]
    width = WINDOW_BYTES // ((rows.stop - rows.start) * size)
    if wanted >= width or (row - wanted) * size <= GAP:
        return stored
    start, stop = columns.start // width * width, -(-columns.stop // width) * width
    return (*stored[:-1], slice(start, min(stop, row)))


def extents(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Lengths of ranges."""
    return [stop - start for start, stop in pairs]
