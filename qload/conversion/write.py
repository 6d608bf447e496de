"""The files of a new checkpoint, one after another, each complete before it has its name."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import torch
from torch import Tensor

from qload.conversion.folder import UnfinishedFolder
from qload.conversion.items import Loaded
from qload.conversion.shards import OutputFile
from qload.weights import Weights

Progress = Callable[[str, int, int], None]  # a stage, bytes that are done, bytes of all


def write_shards(
    shards: Sequence[OutputFile], weights: Weights, folder: UnfinishedFolder, progress: Progress
) -> None:
    """All that are not complete yet; layers that are rewritten are read ahead of."""
    missing = [shard for shard in shards if shard.name not in folder.done]
    total = sum(shard.source for shard in shards)
    done = total - sum(shard.source for shard in missing)
    streamed = [item.streamed for shard in missing for item in shard.items if item.streamed is not None]
    progress("writing", done, total)
    with closing(weights.stream(streamed)) as loaded:  # type: ignore[type-var]
        for shard in missing:
            for count in _write(shard, loaded, folder):
                done += count
                progress("writing", done, total)
            folder.complete(shard.name)


def _write(shard: OutputFile, loaded: Loaded, folder: UnfinishedFolder) -> Iterator[int]:
    """One file; told are the bytes that were read for each item."""
    with folder.part(shard.name).open("wb") as file:
        file.write(shard.header)
        file.truncate(shard.nbytes)
        for item in shard.items:
            for name, at, tensor in item.read(loaded):
                info = shard.tensors[name]
                assert tensor.dtype == info.dtype
                assert at + tensor.nbytes <= info.nbytes
                file.seek(shard.places[name] + at)
                file.write(_bytes(tensor))
            yield item.source


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
