"""Which runs of equal bytes are sound: inputs and outputs that were padded, or that nothing uses.

Of codes a byte says nothing by itself: a group of zeros has the codes of its zero point, which is any. What
the codes mean decides.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qload.errors import QloadError
from qload.formats import Exl2Config
from qload.loader import LayerDescription, Part
from qload.loader.cuts import granule
from qload.verify.subject import Subject
from qload.verify.values import Run

OUTPUTS = 16  # that are looked at, of many
MOST = 1 << 22  # weights that are looked at where a layer is cut nowhere else; of more, none
SEVERAL = 4  # rows, as KEPT runs have room for, that are zero at the same place
EDGE = 8  # bytes by which equal neighbours make a run longer


def row_of(subject: Subject, name: str) -> int:
    """The bytes of a place of the outermost axis of a tensor; of bytes that lie flat, of an output."""
    assert subject.weights is not None
    info, layer = subject.weights.info(name), subject.layer_of(name)
    flat = len(info.shape) == 2 and info.shape[-1] == 1 and layer is not None
    rows = layer.N if flat and layer is not None else info.shape[0]
    return max(1, info.nbytes // max(1, rows))


def mixes_widths(layer: LayerDescription) -> bool:
    """Whether codes of several widths fill the rows of words, so that no row says which inputs it holds."""
    return isinstance(layer.format.config, Exl2Config)


def means_zero(
    subject: Subject, name: str, first: int, length: int, columns: tuple[int, int] | None = None
) -> bool:
    """Whether all weights of the rows of codes that these bytes are of are zero; of several widths, all rows.

    `columns`: the bytes of a row that are meant; None: all of them.
    """
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
            inputs, outputs = slice(start * each, stop * each), _share(columns, width, layer.N)
            ends = (outputs.start, (outputs.start + outputs.stop) // 2)
            return outputs.start < outputs.stop and all(
                not _weights(subject, layer, at, 1)[:, inputs].any() for at in ends
            )
        if mixes_widths(layer):
            ends = (0, layer.N // 2)
            return not any(_weights(subject, layer, at, 1).any() for at in ends)
        if not (axis.follows("N") or axis.flat):
            return False
        each, inputs = -(-layer.N // rows), _share(columns, width, layer.K)
        some = min(stop - start, OUTPUTS) * each
        return not _weights(subject, layer, start * each, some)[:, inputs].any()
    except QloadError:
        return False  # another rule tells


def _share(columns: tuple[int, int] | None, width: int, count: int) -> slice:
    """Which of `count` inputs or outputs lie in these bytes of a row."""
    if columns is None:
        return slice(0, count)
    return slice(-(-columns[0] * count // width), columns[1] * count // width)


def striped(subject: Subject, name: str, runs: Sequence[Run], width: int) -> frozenset[Run]:
    """The runs that several rows have at the same place: inputs, or outputs, that were padded or pruned."""
    found: set[Run] = set()
    for run in runs:
        low, high = _place(run, width)
        alike = [other for other in runs if _near(_place(other, width), (low, high))]
        if len(alike) < SEVERAL or high - low >= width or high > width + EDGE:
            continue
        if subject.holds_codes(name):
            inside = (max(0, low) + EDGE, min(high, width) - EDGE)
            zero = means_zero(subject, name, run.first + EDGE, 1, inside)
        else:
            zero = run.byte == 0
        if zero:
            found.add(run)
    return frozenset(found)


def _place(run: Run, width: int) -> tuple[int, int]:
    """Where in a row a run begins and ends; one that begins at the end of the row before begins before 0."""
    low = run.first % width
    low -= width * (width - low < EDGE)
    return low, low + run.length


def _near(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return abs(one[0] - other[0]) < EDGE and abs(one[1] - other[1]) < EDGE


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
