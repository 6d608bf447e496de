"""Layout and writing of the safetensors files of a new checkpoint."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from qload.conversion.atomic_folder import UnfinishedFolder
from qload.conversion.output_tensors import Item
from qload.storage import DTYPES, TensorInfo
from qload.storage.header import LENGTH_BYTES
from qload.verify.workers import Workers

ALIGNED = 8  # bytes: the longest element there is
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class OutputFile:
    """A file by its name, and what is written to it."""

    name: str
    items: Sequence[Item]

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By name, in the order of the file: what is no multiple of 8 bytes comes last, the long types first.

        So each tensor begins where its type may, as readers that map the file want it.
        """
        held = {name: info for item in self.items for name, info in item.tensors.items()}
        odd = {name for name, info in held.items() if info.nbytes % ALIGNED}
        last = sorted(odd, key=lambda name: (-held[name].dtype.itemsize, name))
        return {name: held[name] for name in (*(name for name in held if name not in odd), *last)}

    @cached_property
    def header(self) -> bytes:
        """What stands before the data: its length, then JSON, with spaces to a multiple of 8 bytes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, info in self.tensors.items():
            place = [at, at + info.nbytes]
            entries[name] = {"dtype": NAMES[info.dtype], "shape": list(info.shape), "data_offsets": place}
            at += info.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNED)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Where each tensor begins, in bytes from the start of the file."""
        at, found = len(self.header), {}
        for name, info in self.tensors.items():
            found[name] = at
            at += info.nbytes
        return found

    @cached_property
    def nbytes(self) -> int:
        """How long the file is."""
        return len(self.header) + sum(info.nbytes for info in self.tensors.values())

    @property
    def source(self) -> int:
        """The bytes that are read for it."""
        return sum(item.source for item in self.items)


def shards_of(items: Iterable[Item], most: int) -> list[OutputFile]:
    """Files of at most so many bytes, each of at least one item, in order."""
    runs: list[list[Item]] = []
    size = 0
    for item in items:
        if not runs or (size and size + item.nbytes > most):
            runs.append([])
            size = 0
        runs[-1].append(item)
        size += item.nbytes
    if len(runs) == 1:
        return [OutputFile("model.safetensors", runs[0])]
    count = len(runs)
    return [OutputFile(f"model-{at:05d}-of-{count:05d}.safetensors", run) for at, run in enumerate(runs, 1)]


def index_of(shards: Sequence[OutputFile]) -> dict[str, object] | None:
    """The index of several files; None of one, which needs none."""
    if len(shards) == 1:
        return None
    total = sum(info.nbytes for shard in shards for info in shard.tensors.values())
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


T = TypeVar("T")


class Behind:
    """One thread that does one task after another."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._tasks: list[Future[object]] = []

    def later(self, task: Callable[[], T]) -> "Future[T]":
        """A task for the thread; raises what an earlier one raised."""
        self._raise(each for each in self._tasks if each.done())
        made = self._pool.submit(task)
        self._tasks.append(made)  # type: ignore[arg-type]
        return made

    def wait(self) -> None:
        """Until all is done; raises what one of them raised."""
        self._raise(self._tasks)

    def _raise(self, tasks: "Iterator[Future[object]] | list[Future[object]]") -> None:
        for each in tasks:
            each.result()


@contextmanager
def behind(name: str) -> Iterator[Behind]:
    """A thread of this name; afterwards what it has not begun is not done any more."""
    pool = ThreadPoolExecutor(1, name)
    try:
        yield Behind(pool)
    finally:
        pool.shutdown(cancel_futures=True)


Progress = Callable[[str, int, int], None]  # a stage, bytes that are done, bytes of all
HELD = 160 << 20  # bytes of layers that are rewritten at once; one alone may be larger


def write_shards(shards: Sequence[OutputFile], folder: UnfinishedFolder, progress: Progress) -> None:
    """All that are not complete yet: shared by processes, the layers of one by threads as memory allows.

    While one file is written those before it are hashed, and brought to the disk.
    """
    missing = folder.crew.share([shard for shard in shards if shard.name not in folder.done])
    written = [shard for shard in shards if shard.name in folder.done]
    done = sum(shard.source for shard in written)
    total = done + sum(shard.source for shard in missing)
    progress("writing", done, total)
    with behind("qload-complete") as completing:
        for shard in missing:
            _write(shard, folder, partial(_tell, progress, done, total))
            completing.later(partial(folder.complete, shard.name))
            done += shard.source
        completing.wait()
    folder.together()


def _tell(progress: Progress, before: int, total: int, count: int, _: int) -> None:
    progress("writing", before + count, total)


def _write(shard: OutputFile, folder: UnfinishedFolder, tell: Callable[[int, int], None]) -> None:
    """One file; told are the bytes that were read for it, and all."""
    with folder.part(shard.name).open("wb") as file:
        file.write(shard.header)
        file.truncate(shard.nbytes)
        file.flush()
        descriptor = file.fileno()

        def write(at: int) -> None:
            _write_item(shard, shard.items[at], descriptor)

        sizes = [item.source for item in shard.items]
        Workers.of(None).run(write, sizes, tell, threads(shard))


def threads(shard: OutputFile) -> int:
    """How many of the file's items may be in memory at once."""
    return max(1, HELD // max(1, *(item.held for item in shard.items)))


def _write_item(shard: OutputFile, item: Item, descriptor: int) -> None:
    for name, at, tensor in item.read():
        info = shard.tensors[name]
        assert tensor.dtype == info.dtype
        assert at + tensor.nbytes <= info.nbytes
        _write_at(descriptor, _bytes(tensor), shard.places[name] + at)


def _write_at(descriptor: int, content: memoryview, place: int) -> None:
    while content:  # one call writes 2 GiB at most
        count = os.pwrite(descriptor, content, place)
        content, place = content[count:], place + count


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
