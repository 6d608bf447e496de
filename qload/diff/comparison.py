"""Comparison of a layer or tensor between two checkpoints: by codes, by values, after rounding.

Every format dequantizes by

    w = (code - zero) * scale[n_group, k_group] * factor

so weights with equal operands have equal values, and are compared without dequantizing. Weights whose
operands differ may still have equal values; these are dequantized.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import lcm

import torch
from torch import Tensor

from qload.devices import CodesInWords, LazyCodes
from qload.diagnosis.comparison import effective_weight
from qload.diff.report import LayerDiff, Outcome
from qload.dtypes import TORCH
from qload.errors import QloadError
from qload.layouts import Packing
from qload.layouts.packing import PackedCodes
from qload.loader import LayerDescription
from qload.loader.sharding import granule
from qload.spec import Codes, Weight
from qload.storage import WeightStorage
from qload.verify.blocks import MAX_ELEMENTS, pieces
from qload.verify.comparison import ROUNDED_DTYPES, equal_bits
from qload.verify.diagnose_diff import SideBySide, find_misplaced, find_misreading

CODE_BLOCK_ELEMENTS = 1 << 24  # compared at once in packed form
TENSOR_BLOCK_ELEMENTS = 1 << 18
MAX_PLAIN_DISTANCE = 0.5  # to a plain layer; a wrong hypothesis does not come nearer by chance


def has_packed_codes(weight: Weight) -> bool:
    """Return whether the packed codes of a weight determine its values, with scales and zero points."""
    if weight.plain or type(weight).dequantize is not Weight.dequantize or weight.input_factors is not None:
        return False
    if weight.low_rank is not None or weight.layer.transforms is not None:
        return False
    return isinstance(weight.codes().codes, CodesInWords)


def equal_codes(first: Weight, second: Weight) -> bool:
    """Return whether two weights with packed codes have equal operands, and so equal values.

    Weights with different operands, such as other group sizes, may have equal values as well.
    """
    ours, theirs = first.codes(), second.codes()
    return _equal_scales(ours, theirs) and _equal_words(ours.codes, theirs.codes)


def same_weight(first: Weight, second: Weight) -> bool:
    """Return whether two weights are equal in type, shape, activations and the bytes of each tensor.

    If their configs differ, their values are compared.
    """
    ours, theirs = first.fields(), second.fields()
    if first.layer.transforms != second.layer.transforms:
        return False
    if (type(first), first.shape, first.activations) != (type(second), second.shape, second.activations):
        return False
    if ours.keys() != theirs.keys() or not all(_equal_tensors(ours[name], theirs[name]) for name in ours):
        return False
    return bool(first.config == second.config) or _equal_tensors(
        effective_weight(first), effective_weight(second)
    )


def _equal_scales(ours: Codes, theirs: Codes) -> bool:
    """Compare all operands but the codes."""
    if (ours.bits, ours.divide, ours.factor) != (theirs.bits, theirs.divide, theirs.factor):
        return False
    names = "scales", "zeros", "k_group", "n_group", "lookup", "row_factors", "offsets"
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in names]
    return all(a is b is None or _equal_tensors(a, b) for a, b in pairs)


def _equal_tensors(first: Tensor | None, second: Tensor | None) -> bool:
    """Return whether both are tensors of one dtype and shape, with equal bits."""
    if first is None or second is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    return equal_bits(first, second)


def _equal_words(ours: Tensor | LazyCodes, theirs: Tensor | LazyCodes) -> bool:
    """Compare packed codes, after packing the second in the order of the first."""
    if not isinstance(ours, PackedCodes) or not isinstance(theirs, PackedCodes) or ours.order is not None:
        return False
    aligned = theirs.T if ours.turned else theirs
    if aligned.packing == ours.packing and not aligned.turned and aligned.order is None:
        return equal_bits(aligned.words, ours.words)
    return isinstance(ours.packing, Packing) and equal_bits(ours.packing.pack(aligned), ours.words)


@dataclass
class ValueDiff:
    """Accumulated comparison of two tensors, block by block.

    Attributes
    ----------
    bits
        Whether all values are equal so far, bit for bit.
    differing, total
        Number of values that differ after rounding, and of all values.
    first
        Index of the first value that differs, with both values.
    block
        First output of its block, and one past the last.
    """

    bits: bool = True
    differing: int = 0
    total: int = 0
    first: tuple[tuple[int, ...], float, float] | None = None
    block: tuple[int, int] = field(init=False)

    @property
    def outcome(self) -> Outcome:
        """Outcome of the comparison."""
        return "bits" if self.bits else "differs" if self.differing else "rounded"

    def add(self, start: int, ours: Tensor, theirs: Tensor, dtype: torch.dtype | None) -> None:
        """Compare a block whose first output is `start`, after rounding to `dtype` if bits differ."""
        self.total += ours.numel()
        if ours.dtype == theirs.dtype and equal_bits(ours, theirs):
            return
        self.bits = False
        if dtype is not None:
            ours, theirs = ours.to(dtype), theirs.to(dtype)
        if ours.dtype == theirs.dtype and equal_bits(ours, theirs):
            return
        differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
        count = int(differs.sum())
        self.differing += count
        if count and self.first is None:
            index = torch.nonzero(differs)[0].tolist()
            shifted = (index[0] + start, *index[1:]) if index else ()
            self.first = (shifted, float(ours[tuple(index)]), float(theirs[tuple(index)]))
            self.block = (start, start + (ours.shape[0] if ours.ndim else 1))

    @property
    def text(self) -> str:
        """First difference and number of differences; "" if there are none."""
        if self.first is None:
            return ""
        index, ours, theirs = self.first
        values = f"{ours:g} in the first checkpoint, {theirs:g} in the second"
        return f"first at ({', '.join(map(str, index))}): {values}; {self.differing} of {self.total} differ"


def rounds_to(first: Weight, second: Weight, dtype: torch.dtype | None) -> bool:
    """Return whether one weight is plain in `dtype`, and the other one quantized and rounds to equal bits.

    False as well for two plain weights, and for weights with input factors.
    """
    plain, coded = (first, second) if first.plain else (second, first)
    if not plain.plain or coded.plain or coded.input_factors is not None:
        return False
    values = plain.fields()["weight"]
    return values.dtype == dtype and equal_bits(coded.dequantize(values.dtype), values)


def narrowest(*dtypes: torch.dtype | None) -> torch.dtype | None:
    """Return the narrowest of float32, float16 and bfloat16 among `dtypes`, or None."""
    narrow = [dtype for dtype in dtypes if dtype in ROUNDED_DTYPES]
    return min(narrow, key=lambda dtype: torch.finfo(dtype).bits) if narrow else None


def compare_layers(pair: SideBySide, others: Mapping[str, LayerDescription]) -> LayerDiff:
    """Compare two layers block by block.

    `others` are the layers of the second checkpoint, among which a misplaced layer is searched.
    """
    ours, theirs = pair.layer, pair.other
    if (ours.N, ours.K) != (theirs.N, theirs.K):
        shapes = f"({ours.N}, {ours.K}) in the first checkpoint, ({theirs.N}, {theirs.K}) in the second"
        return LayerDiff(ours.prefix, theirs.prefix, "shape", f"(N, K) is {shapes}")
    try:
        if pair.has_equal_bytes():
            return LayerDiff(ours.prefix, theirs.prefix, "bits", total=ours.N * ours.K)
        values = _compare_blocks(pair)
        detail = _detail(pair, values, others)
    except QloadError as error:
        return LayerDiff(ours.prefix, theirs.prefix, "refused", str(error))
    return LayerDiff(ours.prefix, theirs.prefix, values.outcome, detail, values.differing, values.total)


def _compare_blocks(pair: SideBySide) -> ValueDiff:
    """Compare packed codes in large blocks if both have some, and values where codes differ.

    Of other layers the first block is short: if it shows values that were rounded, the rest is compared
    after rounding.
    """
    ours, theirs = pair.layer, pair.other
    values, dtype = ValueDiff(), narrowest(_plain_dtype(ours), _plain_dtype(theirs))
    granularity = lcm(*(granule(layer, "N") or layer.N for layer in (ours, theirs)))
    packed = all(map(has_packed_codes, pair.load((0, min(granularity, ours.N)))))
    elements = CODE_BLOCK_ELEMENTS if packed else MAX_ELEMENTS
    short = 0 if packed else min(granularity, ours.N)
    blocks = [
        *output_blocks((0, short), ours.K, granularity, elements),
        *output_blocks((short, ours.N), ours.K, granularity, elements),
    ]
    for block in blocks:
        if packed and equal_codes(*pair.load(block)):
            values.total += (block[1] - block[0]) * ours.K
            continue
        for part in output_blocks(block, ours.K, granularity, MAX_ELEMENTS):
            left, right = pair.load(part)
            if not values.bits and rounds_to(left, right, dtype):
                values.total += (part[1] - part[0]) * ours.K
                continue
            values.add(part[0], effective_weight(left), effective_weight(right), dtype)
    return values


def output_blocks(
    outputs: tuple[int, int], K: int, granularity: int, elements: int
) -> Iterator[tuple[int, int]]:
    """Yield blocks of about `elements` weights that start at multiples of `granularity` from the first."""
    step = max(1, elements // max(1, K) // granularity) * granularity
    for start in range(outputs[0], outputs[1], step):
        yield start, min(start + step, outputs[1])


def compare_tensors(ours: WeightStorage, name: str, theirs: WeightStorage, other: str) -> LayerDiff:
    """Compare two tensors outside of layers, such as biases, block by block."""
    first, second = ours.info(name), theirs.info(other)
    if first.shape != second.shape:
        shapes = f"shape is {first.shape} in the first checkpoint, {second.shape} in the second"
        return LayerDiff(name, other, "shape", shapes)
    values, dtype = ValueDiff(), narrowest(first.dtype, second.dtype)
    widened = first.dtype != second.dtype and {first.dtype, second.dtype} <= {*ROUNDED_DTYPES}
    for left, right in zip(_flat_blocks(ours, name), _flat_blocks(theirs, other), strict=True):
        if widened:
            left, right = left.float(), right.float()
        values.add(values.total, left, right, dtype)
    return LayerDiff(name, other, values.outcome, values.text, values.differing, values.total)


def _flat_blocks(storage: WeightStorage, name: str) -> Iterator[torch.Tensor]:
    """Yield all elements in order, in blocks of one size for any dtype; 8-bit floats as float32."""
    pending: list[torch.Tensor] = []
    count, step = 0, TENSOR_BLOCK_ELEMENTS
    for piece in pieces(storage, name):
        narrow = piece.dtype.is_floating_point and piece.dtype.itemsize == 1
        pending.append(piece.float() if narrow else piece)
        count += len(piece)
        if count >= step:
            joined = torch.cat(pending)
            full = count // step * step
            yield from torch.split(joined[:full], step)
            pending, count = [joined[full:]], count - full
    if count:
        yield torch.cat(pending)


def _plain_dtype(layer: LayerDescription) -> torch.dtype | None:
    return TORCH[layer.dtypes["weight"]] if layer.format.weight_type.plain else None


def _detail(pair: SideBySide, values: ValueDiff, others: Mapping[str, LayerDescription]) -> str:
    """Return the first difference, and the fault or misplacement that explains it."""
    if values.first is None:
        return ""
    against_plain = pair.other.format.weight_type.plain and not pair.layer.format.weight_type.plain
    cause = find_misreading(pair, values.block, against_plain * MAX_PLAIN_DISTANCE)
    cause = cause or find_misplaced(pair, values.block, others)
    if cause is None:
        turned = SideBySide(pair.reference, pair.other, pair.checkpoint, pair.layer)
        cause = find_misreading(turned, values.block, 0)
        cause = f"the second checkpoint against the first: {cause}" if cause else None
    return f"{values.text}; {cause}" if cause else values.text
