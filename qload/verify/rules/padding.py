"""Which runs of equal bytes are sound: inputs and outputs that were padded, or that nothing uses.

Of codes a byte says nothing by itself: a group of zeros has the codes of its zero point, which is any. What
the codes mean decides.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qload.errors import QloadError
from qload.loader import LayerDescription, Part
from qload.loader.cuts import granule
from qload.verify.subject import Subject
from qload.verify.values import Run

OUTPUTS = 16  # that are looked at, of many
MOST = 1 << 22  # weights that are looked at where a layer is cut nowhere else; of more, none
SEVERAL = 4  # rows, as KEPT runs have room for, that end alike


def row_of(subject: Subject, name: str) -> int:
    """The bytes of a place of the outermost axis of a tensor; of bytes that lie flat, of an output."""
    assert subject.weights is not None
    info, layer = subject.weights.info(name), subject.layer_of(name)
    flat = len(info.shape) == 2 and info.shape[-1] == 1 and layer is not None
    rows = layer.N if flat and layer is not None else info.shape[0]
    return max(1, info.nbytes // max(1, rows))


def means_zero(subject: Subject, name: str, first: int, length: int) -> bool:
    """Whether all weights of the rows of codes that these bytes are of are zero."""
    layer = subject.layer_of(name)
    if layer is None or not subject.holds_codes(name):
        return False
    assert subject.weights is not None
    width = row_of(subject, name)
    rows = max(1, subject.weights.info(name).nbytes // width)
    start, stop = first // width, -(-(first + length) // width)
    axis = layer.specs[0].axes[0]
    try:
        if axis.follows("K"):
            each = -(-layer.K // rows)
            ends = (0, layer.N // 2)
            return all(
                not _weights(subject, layer, at, 1)[:, start * each : stop * each].any() for at in ends
            )
        if not (axis.follows("N") or axis.flat):
            return False
        each = -(-layer.N // rows)
        some = min(stop - start, OUTPUTS) * each
        return not _weights(subject, layer, start * each, some).any()
    except QloadError:
        return False  # another rule tells


def pads_inputs(subject: Subject, name: str, runs: Sequence[Run]) -> bool:
    """Whether several rows end with as many zeros: inputs that were padded."""
    width = row_of(subject, name)
    ends = [run for run in runs if (run.first + run.length) % width < 8 and run.length < width]
    alike = [run for run in ends if abs(run.length - ends[0].length) < 8]
    if len(alike) < SEVERAL:
        return False
    layer = subject.layer_of(name)
    if layer is None or layer.format.weight_type.plain:
        return all(run.byte == 0 for run in alike)
    row, columns = alike[0].first // width, (alike[0].length - 8) * layer.K // width
    try:
        return columns > 0 and not _weights(subject, layer, row, 1)[:, -columns:].any()
    except QloadError:
        return False


def _weights(subject: Subject, layer: LayerDescription, first: int, count: int) -> Tensor:
    """The weights of these outputs (count or fewer, K); of none, ones."""
    assert subject.weights is not None
    block = granule(layer, "N") or layer.N
    start = first // block * block
    stop = min(layer.N, -(-(first + count) // block) * block)
    if stop <= first or (stop - start) * layer.K * layer.sizes.get("E", 1) > MOST:
        return torch.ones(1, layer.K)
    weight = subject.loader.load(subject.weights, [Part(layer.prefix, start, stop)], None)
    return weight.dequantize()[first - start : first - start + count]
