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

from qload.conversion.atomic_folder import AtomicFolder
from qload.conversion.output_tensors import OutputItem
from qload.storage import DTYPES, TensorInfo
from qload.storage.header import LENGTH_BYTES
from qload.verify.workers import Workers

T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # stage, finished bytes, total bytes
ALIGNMENT_BYTES = 8  # size of the largest element type
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
MAX_MEMORY_BYTES = 160 << 20  # for layers that are rewritten at once; a single layer may need more


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file and the items to write to it."""

    name: str
    items: Sequence[OutputItem]

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by name in file order.

        Sizes that are no multiple of 8 bytes come last, large element types first. So every tensor starts at
        a multiple of its element size, as readers that map the file expect.
        """
        infos = {name: info for item in self.items for name, info in item.tensors.items()}
        odd = {name for name, info in infos.items() if info.nbytes % ALIGNMENT_BYTES}
        last = sorted(odd, key=lambda name: (-infos[name].dtype.itemsize, name))
        return {name: infos[name] for name in (*(name for name in infos if name not in odd), *last)}

    @cached_property
    def header(self) -> bytes:
        """Header of the file: its length, then JSON, padded with spaces to a multiple of 8 bytes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, info in self.tensors.items():
            span, dtype = [start, start + info.nbytes], DTYPE_NAMES[info.dtype]
            entries[name] = {"dtype": dtype, "shape": list(info.shape), "data_offsets": span}
            start += info.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT_BYTES)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

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


def split_into_files(items: Iterable[OutputItem], max_bytes: int) -> list[OutputFile]:
    """Distribute items over files of at most `max_bytes`, in order; a larger item has its own file."""
    groups: list[list[OutputItem]] = []
    size = 0
    for item in items:
        if not groups or (size and size + item.nbytes > max_bytes):
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.nbytes
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
        content = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        offset = file.offsets[name] + start
        while content:  # one call writes 2 GiB at most
            count = os.pwrite(descriptor, content, offset)
            content, offset = content[count:], offset + count
