"""Tensors and files of a new checkpoint: headers known in advance, contents read or computed on demand."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from qload.conversion.atomic_folder import AtomicFolder
from qload.devices.tensors import dense
from qload.dtypes import STORED
from qload.errors import RepackError
from qload.experts import ExpertStacks
from qload.kernel_formats.repack import find_reader
from qload.loader import LayerDescription, Part
from qload.loader.source import source_without_codes
from qload.spec import Weight, named
from qload.spec.integers import Integers
from qload.storage import TensorInfo, WeightStorage
from qload.storage.safetensors_writer import encode_header, file_order
from qload.verify.blocks import load_output_blocks, pieces
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.workers import Workers
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


def rename_tensors(item: OutputItem, names: Mapping[str, str]) -> OutputItem:
    """Return an item with its tensors under new names."""

    def read() -> Iterator[Chunk]:
        for name, offset, chunk in item.read():
            yield names[name], offset, chunk

    tensors = {names[name]: info for name, info in item.tensors.items()}
    return OutputItem(tensors, item.source_bytes, read, item.memory_bytes)


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


def tensor_names(source: VerifiedCheckpoint, prefix: str) -> list[str]:
    """Return the names of a layer's tensors."""
    layer = source.layers[prefix]
    assert isinstance(layer, LayerDescription)
    return [layer.names.full(spec.name) for spec in layer.specs]


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

    info = TensorInfo(STORED[dtype], (layer.N, layer.K))
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

    tensors = {
        name: TensorInfo(STORED[tensor.dtype], tuple(tensor.shape)) for name, tensor in outline.items()
    }
    output_bytes = sum(info.nbytes for info in tensors.values())
    return OutputItem(tensors, source_bytes, read, output_bytes + (output_bytes if copied else source_bytes))


def to_integers(weight: Weight) -> Integers:
    """Read a weight of an integer format into plain order; RepackError for any other format."""
    reader = find_reader(type(weight), weight.config)
    if reader is None or reader.intermediate is not Integers:
        reason = f"{weight.format} has no integer codes with group scales alone"
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


T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # stage, finished bytes, total bytes
INDEX = "model.safetensors.index.json"
MAX_MEMORY_BYTES = 160 << 20  # for layers that are rewritten at once; a single layer may need more


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file and the items to write to it."""

    name: str
    items: Sequence[OutputItem]

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by name in file order."""
        return file_order({name: info for item in self.items for name, info in item.tensors.items()})

    @cached_property
    def header(self) -> bytes:
        """Header of the file."""
        return encode_header(self.tensors)

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Offset of each tensor from the start of the file, in bytes."""
        offset, offsets = len(self.header), {}
        for name, info in self.tensors.items():
            offsets[name] = offset
            offset += info.nbytes
        return offsets

    @cached_property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.header) + sum(info.nbytes for info in self.tensors.values())

    @property
    def source_bytes(self) -> int:
        """Total source bytes of its items."""
        return sum(item.source_bytes for item in self.items)


def group_by_size(items: Iterable[OutputItem], max_bytes: int) -> list[list[OutputItem]]:
    """Distribute items over groups of at most `max_bytes`, in order; a larger item has its own group."""
    groups: list[list[OutputItem]] = []
    size = 0
    for item in items:
        if not groups or (size and size + item.nbytes > max_bytes):
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.nbytes
    return groups


def split_into_files(items: Iterable[OutputItem], max_bytes: int) -> list[OutputFile]:
    """Distribute items over files of at most `max_bytes`, in order; a larger item has its own file."""
    groups = group_by_size(items, max_bytes)
    if len(groups) == 1:
        return [OutputFile("model.safetensors", groups[0])]
    count = len(groups)
    return [OutputFile(f"model-{n:05d}-of-{count:05d}.safetensors", part) for n, part in enumerate(groups, 1)]


def safetensors_index(files: Sequence[OutputFile]) -> dict[str, object] | None:
    """Return the content of `model.safetensors.index.json`, or None for a single file."""
    if len(files) == 1:
        return None
    total = sum(info.nbytes for file in files for info in file.tensors.values())
    weight_map = {name: file.name for file in files for name in file.tensors}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


class BackgroundThread:
    """Thread for tasks that run one after another."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._tasks: list[Future[object]] = []

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """Queue a task; raises the exception of an earlier task that failed."""
        for earlier in self._tasks:
            if earlier.done():
                earlier.result()
        future = self._pool.submit(task)
        self._tasks.append(future)  # type: ignore[arg-type]
        return future

    def wait(self) -> None:
        """Wait for all tasks; raises the exception of a task that failed."""
        for task in self._tasks:
            task.result()


@contextmanager
def background_thread(name: str) -> Iterator[BackgroundThread]:
    """Run a thread with this name for the `with` block; on exit, queued tasks are cancelled."""
    pool = ThreadPoolExecutor(1, name)
    try:
        yield BackgroundThread(pool)
    finally:
        pool.shutdown(cancel_futures=True)


def write_files(files: Sequence[OutputFile], folder: AtomicFolder, progress: Progress) -> None:
    """Write the files that are not complete in `folder`.

    Processes take whole files; threads of a process take items of one file, within `MAX_MEMORY_BYTES`.
    A background thread hashes and syncs a file while the next one is written.
    """
    missing = folder.workers.share([file for file in files if file.name not in folder.completed])
    done = sum(file.source_bytes for file in files if file.name in folder.completed)
    total = done + sum(file.source_bytes for file in missing)
    progress("writing", done, total)
    with background_thread("qload-complete") as completion:
        for file in missing:
            _write_file(file, folder, partial(_report_written, progress, done, total))
            completion.submit(partial(folder.complete, file.name))
            done += file.source_bytes
        completion.wait()
    folder.synchronize()


def _report_written(progress: Progress, earlier: int, total: int, done: int, _: int) -> None:
    progress("writing", earlier + done, total)


def _write_file(file: OutputFile, folder: AtomicFolder, progress: Callable[[int, int], None]) -> None:
    """Write one file; `progress` receives the source bytes that were read, and their total."""
    with folder.part_path(file.name).open("wb") as stream:
        stream.write(file.header)
        stream.truncate(file.nbytes)
        stream.flush()
        descriptor = stream.fileno()
        sizes = [item.source_bytes for item in file.items]
        Workers.of(None).run(
            lambda n: _write_item(file, file.items[n], descriptor), sizes, progress, max_threads(file)
        )


def max_threads(file: OutputFile) -> int:
    """Return the number of items of the file that fit into `MAX_MEMORY_BYTES` together, at least 1."""
    return max(1, MAX_MEMORY_BYTES // max(1, *(item.memory_bytes for item in file.items)))


def _write_item(file: OutputFile, item: OutputItem, descriptor: int) -> None:
    for name, start, tensor in item.read():
        info = file.tensors[name]
        assert tensor.dtype == info.dtype
        assert start + tensor.nbytes <= info.nbytes
        content = memoryview(dense(tensor.reshape(-1)).view(torch.uint8).numpy().data)
        offset = file.offsets[name] + start
        while content:  # one call writes 2 GiB at most
            count = os.pwrite(descriptor, content, offset)
            content, offset = content[count:], offset + count
