"""Which file each tensor of a new checkpoint goes into, and where in it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from qload.conversion.items import Item
from qload.storage import DTYPES, TensorInfo
from qload.storage.header import LENGTH_BYTES

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
