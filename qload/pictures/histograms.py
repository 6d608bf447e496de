"""Pictures of a layer's values: a histogram of its scales, and a map of its errors against a reference."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor

from qload.errors import QloadError, checked
from qload.loader import LayerDescription
from qload.spec import Role, TensorSpec
from qload.verify.blocks import read_float_rows
from qload.verify.checkpoint import Checkpoint
from qload.verify.workers import Workers

MAX_THREADS = 4  # each has a run of outputs in memory


@dataclass(frozen=True)
class LayerPictures:
    """Of one layer; "" where there is nothing to draw.

    Attributes
    ----------
    scales
        The least power of two among its scales, and how many scales there are from each power to the next.
    error
        How far all of it is from the reference, and digits for its parts, as `verify` reports it.
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
    """The pictures of each layer of a checkpoint by its name; reads scales alone.

    What cannot be read has no picture, and is no error.

    Parameters
    ----------
    path
        A safetensors file, a directory, or a sharded index.
    error_maps
        Of layers by name, as `verify(path, against=..., error_maps=True)` reports them.
    progress
        Called with ("scales", bytes that were looked at, bytes in all) as the work goes on.
    """
    with closing(Checkpoint.open(path)) as subject:
        if subject.weights is None or subject.errors:
            return {}
        layers, maps = list(subject.described()), error_maps or {}

        def drawn(at: int) -> LayerPictures:
            return LayerPictures(_scale_histogram(subject, layers[at]), maps.get(layers[at].prefix, ""))

        def tell(done: int, total: int) -> None:
            if progress is not None:
                progress("scales", done, total)

        sizes = [
            sum(_tensor_bytes(subject, name) for name, _ in _scale_tensors(subject, layer))
            for layer in layers
        ]
        made = Workers.of(None).run(drawn, sizes, tell, MAX_THREADS)
        return {layer.prefix: pictures for layer, pictures in zip(layers, made, strict=True)}


def _scale_tensors(subject: Checkpoint, layer: LayerDescription) -> Iterator[tuple[str, TensorSpec]]:
    assert subject.weights is not None
    there = subject.weights.storage.keys()
    for spec in layer.specs:
        name = layer.names.full(spec.name)
        if spec.role is Role.SCALE and name in there:
            yield name, spec


def _tensor_bytes(subject: Checkpoint, name: str) -> int:
    assert subject.weights is not None
    return subject.weights.storage.info(name).nbytes


def _scale_histogram(subject: Checkpoint, layer: LayerDescription) -> str:
    assert subject.weights is not None
    counts = dict[int, int]()
    for name, spec in _scale_tensors(subject, layer):
        try:
            for _, run in read_float_rows(subject.weights.storage, name, spec):
                _count_powers(run, counts)
        except QloadError:
            return ""
    return format_histogram(counts)


def _count_powers(run: Tensor, counts: dict[int, int]) -> None:
    """Adds how many values there are of each power of two; neither zeros nor what is not finite."""
    size = run.float().abs().flatten()
    powers = torch.frexp(size[(size > 0) & size.isfinite()]).exponent - 1
    if powers.numel():
        least = int(powers.min())
        for power, count in enumerate(torch.bincount(powers - least).tolist(), least):
            counts[power] = counts.get(power, 0) + count


def format_histogram(counts: Mapping[int, int]) -> str:
    """How many values there are of each power of two, from the least on; "" of none."""
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    return f"2^{least}: {' '.join(str(counts.get(power, 0)) for power in range(least, most + 1))}"
