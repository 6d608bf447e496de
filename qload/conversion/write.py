"""The files of a new checkpoint, one after another, each complete before it has its name."""

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from qload.conversion.behind import behind
from qload.conversion.folder import UnfinishedFolder
from qload.conversion.items import Item
from qload.conversion.shards import OutputFile
from qload.verify.crew import Crew

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
        Crew.of(None).share_out(write, sizes, tell, threads(shard))


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
