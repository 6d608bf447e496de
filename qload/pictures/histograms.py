"""Pictures of a layer's values: a histogram of its scales, and a map of its errors against a reference.

A histogram counts scales by powers of two: "2^-9: 3 10 42". A map has the relative error of the layer and a
digit per part: "0.1042: 5665 5556". The script of an HTML page draws both.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor

from qload.errors import QloadError, checked
from qload.loader import LayerDescription
from qload.spec import Role, TensorSpec
from qload.storage import WeightStorage
from qload.verify.blocks import read_float_rows
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.workers import Workers

MAX_THREADS = 4  # each reads a block of rows into memory


@dataclass(frozen=True)
class LayerPictures:
    """Pictures of one layer as text, or "".

    Attributes
    ----------
    scales
        Smallest power of two among the scales, and the number of scales from each power to the next.
    error
        Relative error of the layer against the reference, and a digit per part, as `verify` reports it.
    """

    scales: str = ""
    error: str = ""


@checked
def layer_pictures(
    path: str | PathLike[str],
    error_maps: Mapping[str, str] | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, LayerPictures]:
    """Return the pictures of each layer of a checkpoint, by its name; only scales are read.

    An unreadable layer has no pictures and raises no error.

    Parameters
    ----------
    path
        A safetensors file, a directory, or a sharded index.
    error_maps
        Name of a layer -> error map, from `verify(path, against=..., error_maps=True)`.
    progress
        Callback with ("scales", bytes done, bytes in all).
    """
    with VerifiedCheckpoint.open(path, collect=True) as subject:
        if not subject.is_readable:
            return {}
        storage = subject.weights.storage
        layers, maps = list(subject.described()), error_maps or {}
        tensors = [list(_scale_tensors(storage, layer)) for layer in layers]

        def count_scales(index: int) -> str:
            return _scale_histogram(storage, tensors[index])

        def update(done: int, total: int) -> None:
            if progress is not None:
                progress("scales", done, total)

        sizes = [sum(storage.info(name).nbytes for name, _ in scales) for scales in tensors]
        histograms = Workers.of(None).run(count_scales, sizes, update, MAX_THREADS)
        return {
            layer.prefix: LayerPictures(histogram, maps.get(layer.prefix, ""))
            for layer, histogram in zip(layers, histograms, strict=True)
        }


def _scale_tensors(storage: WeightStorage, layer: LayerDescription) -> Iterator[tuple[str, TensorSpec]]:
    names = storage.keys()
    for spec in layer.specs:
        name = layer.names.full(spec.name)
        if spec.role is Role.SCALE and name in names:
            yield name, spec


def _scale_histogram(storage: WeightStorage, tensors: Iterable[tuple[str, TensorSpec]]) -> str:
    """Count the scales of a layer; "" if a tensor cannot be read."""
    counts = dict[int, int]()
    for name, spec in tensors:
        try:
            for _, block in read_float_rows(storage, name, spec):
                _count_powers(block, counts)
        except QloadError:
            return ""
    return format_histogram(counts)


def _count_powers(block: Tensor, counts: dict[int, int]) -> None:
    """Add the numbers of values per power of two, without zeros, infinities and NaN."""
    size = block.float().abs().flatten()
    powers = torch.frexp(size[(size > 0) & size.isfinite()]).exponent - 1
    if powers.numel():
        smallest = int(powers.min())
        for power, count in enumerate(torch.bincount(powers - smallest).tolist(), smallest):
            counts[power] = counts.get(power, 0) + count


def format_histogram(counts: Mapping[int, int]) -> str:
    """Format power of two -> count as text, from the smallest power on; "" without counts."""
    if not counts:
        return ""
    smallest, largest = min(counts), max(counts)
    return f"2^{smallest}: {' '.join(str(counts.get(power, 0)) for power in range(smallest, largest + 1))}"
