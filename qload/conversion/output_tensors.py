"""Tensors of the output files: header known in advance, contents read or computed on demand."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qload.errors import RepackError
from qload.experts import ExpertStacks
from qload.kernel_formats.repack import find_reader
from qload.loader import LayerDescription, Part
from qload.loader.source import source_without_codes
from qload.spec import Weight, named
from qload.spec.integers import Integers
from qload.storage import TensorInfo, WeightStorage
from qload.verify.blocks import load_output_blocks, pieces
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.weights import Weights

Chunk = tuple[str, int, Tensor]  # tensor name, offset of the first byte in the tensor, consecutive elements
STACKED = "is stored in one tensor with other experts, and convert does not split such tensors"


@dataclass(frozen=True)
class OutputItem:
    """Unit of writing: the tensors of one layer, or one tensor outside of layers.

    Attributes
    ----------
    tensors
        Dtypes and shapes by name, in the order of writing.
    source_bytes
        Number of bytes that `read` reads from the source.
    read
        Yields the contents in chunks; safe to call from any thread.
    memory_bytes
        Memory that `read` needs at once.
    """

    tensors: Mapping[str, TensorInfo]
    source_bytes: int
    read: Callable[[], Iterator[Chunk]]
    memory_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(info.nbytes for info in self.tensors.values())


def stored_tensors(source: VerifiedCheckpoint) -> WeightStorage:
    """Return the storage of `source` without the view that splits tensors of stacked experts."""
    storage = source.weights.storage
    return storage.storage if isinstance(storage, ExpertStacks) else storage


def copy_tensor(storage: WeightStorage, name: str) -> OutputItem:
    """Return an item for an unchanged copy of one tensor."""

    def read() -> Iterator[Chunk]:
        offset = 0
        for piece in pieces(storage, name):
            yield name, offset, piece
            offset += piece.nbytes

    info = storage.info(name)
    return OutputItem({name: info}, info.nbytes, read)


def items_in_source_order(
    storage: WeightStorage,
    owners: Mapping[str, str],
    items: Mapping[str, OutputItem | None],
    left_out: Collection[str] = (),
) -> Iterator[OutputItem]:
    """Yield each item at its first source tensor, and copies of tensors without an owner.

    `owners` maps source tensors to keys of `items`; an item None is not written.
    """
    written: set[str] = set()
    for name in list(storage.keys()):
        owner = owners.get(name)
        if owner is None and name not in left_out:
            yield copy_tensor(storage, name)
        elif owner is not None and owner not in written:
            written.add(owner)
            item = items[owner]
            if item is not None:
                yield item


def load_layer(source: VerifiedCheckpoint, prefix: str) -> Weight:
    """Load a whole layer."""
    return source.loader.load(source.weights, [Part(prefix)], None)


def load_header(source: VerifiedCheckpoint, layer: LayerDescription) -> Weight:
    """Load a whole layer with placeholders for its codes."""
    header = source_without_codes(source.weights, layer)
    return source.loader.load(header, [Part(layer.prefix)], None)


def dequantize_layer(source: VerifiedCheckpoint, layer: LayerDescription, dtype: torch.dtype) -> OutputItem:
    """Return an item with the dequantized weight of a layer, (N, K) in `dtype`, in blocks of outputs."""
    name, row_bytes = named(layer.prefix, "weight"), layer.K * dtype.itemsize

    def read() -> Iterator[Chunk]:
        for start, weight in load_output_blocks(source.weights, source.loader, layer):
            yield name, start * row_bytes, weight.dequantize(dtype)

    info = TensorInfo(dtype, (layer.N, layer.K))
    return OutputItem({name: info}, layer_bytes(source.weights, layer), read)


def item_from_tensors(
    outline: Mapping[str, Tensor],
    source_bytes: int,
    read_tensors: Callable[[], Mapping[str, Tensor]],
    *,
    copied: bool = False,
) -> OutputItem:
    """Return an item whose tensors are all in memory at once.

    `outline` has the dtypes and shapes of the result of `read_tensors`. Memory is needed for source and
    result; of a `copied` layer for the result twice.
    """

    def read() -> Iterator[Chunk]:
        for name, tensor in read_tensors().items():
            yield name, 0, tensor.contiguous()

    tensors = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in outline.items()}
    output_bytes = sum(info.nbytes for info in tensors.values())
    return OutputItem(tensors, source_bytes, read, output_bytes + (output_bytes if copied else source_bytes))


def to_integers(weight: Weight) -> Integers:
    """Read a weight of an integer format into plain order; RepackError for any other format."""
    reader = find_reader(type(weight))
    if reader is None or reader.intermediate is not Integers:
        reason = f"{weight.format} has no integer codes with group scales"
        raise RepackError(weight.format, "integers", reason)
    integers: Integers = reader.read(weight)
    return integers


def weight_tensors(weight: Weight) -> dict[str, Tensor]:
    """Return the tensors of a whole layer by full name, including a declared `weight_shape`."""
    fields, tensors = weight.fields(), {}
    for spec in weight.tensors(weight.config):
        if spec.name in fields:
            tensors[named(weight.layer.name, spec.suffix)] = fields[spec.name]
        elif spec.name == "weight_shape":
            tensors[named(weight.layer.name, spec.suffix)] = torch.tensor(weight.shape)
    return tensors


def layer_bytes(weights: Weights, layer: LayerDescription) -> int:
    """Return the stored size of a layer in bytes."""
    return sum(weights.storage.info(layer.names.full(spec.name)).nbytes for spec in layer.specs)
