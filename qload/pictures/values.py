"""What a layer's values look like: how large its scales are, and where it is far from a reference.

A histogram counts scales by powers of two; a map has the error of each part of a layer, as a share of what
the reference has there. Both are text that a page draws: "2^-9: 3 10 42", and "0.1042: 5665 5556".
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor

from qload.diagnosis.meaning import meant
from qload.errors import QloadError, checked
from qload.loader import LayerDescription
from qload.spec import Role
from qload.verify.causes import MATRIX, SideBySide
from qload.verify.chunks import values
from qload.verify.crew import Crew
from qload.verify.subject import Subject

GRID = 16  # parts of an axis of a map
LEVELS = 9  # each twice as far from the reference as the one before; the last from its own size on
THREADS = 4  # each has a run of outputs in memory


@dataclass(frozen=True)
class LayerPictures:
    """Of one layer; "" where there is nothing to draw.

    Attributes
    ----------
    scales
        The least power of two among its scales, and how many scales there are from each power to the next.
    error
        How far all of it is from the reference, and a row of digits for each run of outputs, with one for
        each run of inputs: 0 where both are equal, 9 where the error is as large as the reference, or larger;
        each step between them halves it.
    """

    scales: str = ""
    error: str = ""


@checked
def layer_pictures(
    path: str | PathLike[str], against: str | PathLike[str] | None = None
) -> dict[str, LayerPictures]:
    """The pictures of each layer of a checkpoint by its name, with errors beside the reference `against`.

    Reads scales alone, and with a reference all of both. What cannot be read has no picture, and is no error.
    """
    with ExitStack() as stack:
        subject = stack.enter_context(closing(Subject.open(path)))
        reference = stack.enter_context(closing(Subject.open(against))) if against is not None else None
        if subject.weights is None or subject.errors:
            return {}
        layers = list(subject.described())
        sound = reference is not None and reference.weights is not None and not reference.errors
        others = {each.prefix: each for each in reference.described()} if reference and sound else {}

        def drawn(at: int) -> LayerPictures:
            layer = layers[at]
            other = others.get(layer.prefix)
            error = "" if reference is None or other is None else _error(subject, layer, reference, other)
            return LayerPictures(_scales(subject, layer), error)

        made = Crew.of(None).share_out(drawn, [1] * len(layers), lambda done, total: None, THREADS)
        return {layer.prefix: pictures for layer, pictures in zip(layers, made, strict=True)}


def _scales(subject: Subject, layer: LayerDescription) -> str:
    assert subject.weights is not None
    storage, counts = subject.weights.storage, dict[int, int]()
    there = storage.keys()
    for spec in layer.specs:
        name = layer.names.full(spec.name)
        if spec.role is not Role.SCALE or name not in there:
            continue
        try:
            for _, run in values(storage, name, spec):
                _count(run, counts)
        except QloadError:
            return ""
    return histogram(counts)


def _count(run: Tensor, counts: dict[int, int]) -> None:
    """Adds how many values there are of each power of two; neither zeros nor what is not finite."""
    size = run.float().abs().flatten()
    powers = torch.frexp(size[(size > 0) & size.isfinite()]).exponent - 1
    if powers.numel():
        least = int(powers.min())
        for power, count in enumerate(torch.bincount(powers - least).tolist(), least):
            counts[power] = counts.get(power, 0) + count


def histogram(counts: Mapping[int, int]) -> str:
    """How many values there are of each power of two, from the least on; "" of none."""
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    return f"2^{least}: {' '.join(str(counts.get(power, 0)) for power in range(least, most + 1))}"


def _error(subject: Subject, layer: LayerDescription, reference: Subject, other: LayerDescription) -> str:
    if (layer.N, layer.K) != (other.N, other.K):
        return ""
    try:
        pairs = SideBySide(subject, layer, reference, other).runs()
        return error_map(
            ((start, meant(ours), meant(theirs)) for start, ours, theirs in pairs), layer.N, layer.K
        )
    except QloadError:
        return ""


def error_map(runs: Iterator[tuple[int, Tensor, Tensor]], N: int, K: int) -> str:
    """(first output, values, those of the reference) of all outputs in turn -> the map; "" of no matrix."""
    grid = min(GRID, N), min(GRID, K)
    squares = torch.zeros(2, *grid)  # of the error, and of the reference
    columns = torch.arange(K) * grid[1] // max(1, K)
    for start, got, want in runs:
        if want.ndim != MATRIX:
            return ""
        rows = (torch.arange(len(want)) + start) * grid[0] // N
        for into, values_ in zip(squares, (got.float() - want.float(), want.float()), strict=True):
            across = torch.zeros(len(want), grid[1]).index_add_(1, columns, values_.square())
            into.index_add_(0, rows, across)
    if not squares.numel():
        return ""
    error, norm = squares
    whole = float((error.sum() / norm.sum()).sqrt())
    return f"{whole:.4g}: {' '.join(''.join(map(str, row)) for row in _levels(error, norm).tolist())}"


def _levels(error: Tensor, norm: Tensor) -> Tensor:
    """The digits of a map; what is no number is as far as can be."""
    share = torch.where(error == 0, 0.0, (error / norm).sqrt())
    level = (LEVELS + share.log2().floor()).clamp(1, LEVELS).nan_to_num(LEVELS)
    return torch.where(share == 0, 0.0, level).to(torch.int64)
