"""Tensors of the output files: header known in advance, contents read or computed on demand."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qload.errors import RepackError
from qload.experts import ExpertStacks
from qload.kernel_formats.plain_integers import Integers
from qload.kernel_formats.repack import READERS
from qload.loader import FormatLoader, LayerDescription, Part
from qload.spec import Weight, named
from qload.storage import TensorInfo, WeightStorage
from qload.verify.chunks import outputs
from qload.verify.subject import Subject
from qload.verify.values.pieces import pieces
from qload.weights import Weights

STACKED = "is one of several in a tensor of all experts, which is not taken apart"


Piece = tuple[str, int, Tensor]  # of a tensor: its name, the first of its bytes, and those that follow


@dataclass(frozen=True)
class Item:
    """A layer, or a tensor of none, as it will stand in a file.

    `tensors`: by name, in the order in which they are written. `source`: the bytes that are read for it.
    `read`: its bytes, on any thread. `held`: how many bytes that takes at once.
    """

    tensors: Mapping[str, TensorInfo]
    source: int
    read: Callable[[], Iterator[Piece]]
    held: int = 0

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(info.nbytes for info in self.tensors.values())


def copied(storage: WeightStorage, name: str) -> Item:
    """A tensor that stays what it is."""

    def read() -> Iterator[Piece]:
        at = 0
        for piece in pieces(storage, name):
            yield name, at, piece
            at += piece.nbytes

    info = storage.info(name)
    return Item({name: info}, info.nbytes, read)


def dequantized(weights: Weights, loader: FormatLoader, layer: LayerDescription, dtype: torch.dtype) -> Item:
    """A layer as the plain weight that it means, run by run of its outputs."""
    name, width = named(layer.prefix, "weight"), layer.K * dtype.itemsize

    def read() -> Iterator[Piece]:
        for start, weight in outputs(weights, loader, layer):
            yield name, start * width, weight.dequantize(dtype)

    return Item({name: TensorInfo(dtype, (layer.N, layer.K))}, stored_bytes(weights, layer), read)


def rewritten(
    weights: Weights,
    loader: FormatLoader,
    layer: LayerDescription,
    made: Weight,
    write: Callable[[Integers], Weight],
) -> Item:
    """A layer in another format of integers; `made`: as `write` made it without codes."""

    def whole() -> dict[str, Tensor]:
        return stored_tensors(write(meaning(loader.load(weights, [Part(layer.prefix)], None))))

    return of_tensors(stored_tensors(made), stored_bytes(weights, layer), whole)


def of_tensors(
    outline: Mapping[str, Tensor],
    source: int,
    whole: Callable[[], Mapping[str, Tensor]],
    *,
    copied: bool = False,
) -> Item:
    """What is all read, or made, at once; `outline`: tensors like those of `whole`, without their values.

    `source`: the bytes that are read for it, which are in memory with what is made, or `copied` as often.
    """

    def read() -> Iterator[Piece]:
        for name, tensor in whole().items():
            yield name, 0, tensor.contiguous()

    tensors = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in outline.items()}
    written = sum(info.nbytes for info in tensors.values())
    return Item(tensors, source, read, written + (written if copied else source))


def meaning(weight: Weight) -> Integers:
    """Any format's integers in plain order; RepackError of what has none."""
    reader = READERS.get(type(weight))
    if reader is None or reader.intermediate is not Integers:
        raise RepackError(
            weight.format, "integers", f"{weight.format} has no integer codes with scales of groups"
        )
    found: Integers = reader.read(weight)
    return found


def stored_tensors(weight: Weight) -> dict[str, Tensor]:
    """What is stored of a whole layer, by name; with the tensors that only a loader looks at."""
    held, found = weight.fields(), {}
    for spec in weight.tensors(weight.config):
        if spec.name in held:
            found[named(weight.layer.name, spec.suffix)] = held[spec.name]
        elif spec.name == "weight_shape":
            found[named(weight.layer.name, spec.suffix)] = torch.tensor(weight.shape)
    return found


def stored_bytes(weights: Weights, layer: LayerDescription) -> int:
    """Of the tensors that a layer is stored in."""
    return sum(weights.storage.info(layer.names.full(spec.name)).nbytes for spec in layer.specs)


def as_stored(subject: Subject) -> WeightStorage:
    """Its tensors, those of all experts of a layer in one as they are."""
    assert subject.weights is not None
    storage = subject.weights.storage
    return storage.storage if isinstance(storage, ExpertStacks) else storage
