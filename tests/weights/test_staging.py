"""The way to a CUDA device, on streams that write down what they are asked."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload import MemoryStorage, SafetensorsStorage, devices
from qload.testing import assert_same_bits
from qload.weights import prefetch

DEVICE = torch.device("cpu")


@dataclass(eq=False)
class Event:
    """A point of a stream, and what the host did with it."""

    stream: "Stream"
    waited: list[str] = field(default_factory=list)

    def synchronize(self) -> None:
        self.stream.log.append("buffer is free")


@dataclass(eq=False)
class Stream:
    """What was asked of it, in order."""

    log: list[Any] = field(default_factory=list)
    device: torch.device = DEVICE
    cuda_stream: int = 7

    def record_event(self) -> Event:
        self.log.append("point")
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.log.append(event.stream)

    def synchronize(self) -> None:
        self.log.append("all is done")


class Streams:
    """Those of a device that is none: the one at home, and those of threads."""

    def __init__(self) -> None:
        self.home, self.own = Stream(), list[Stream]()

    def new(self, device: torch.device) -> Stream:
        assert device == DEVICE
        self.own.append(Stream())
        return self.own[-1]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """A CUDA landing whose device is the CPU."""
    made = Streams()

    class Buffer:
        def __init__(self, size: int, stream: Stream) -> None:
            self.memory = torch.empty(size, dtype=torch.uint8)
            self.stream, self.copied = stream, stream.record_event()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        yield

    def copied(memory: Tensor, places: Sequence[slice], targets: Sequence[Tensor], onto: Stream) -> None:
        onto.log.append(f"{len(targets)} copies")
        for place, target in zip(places, targets, strict=True):
            target.copy_(memory[place].view(target.dtype).view(target.shape))

    monkeypatch.setattr(prefetch, "PinnedBuffer", Buffer)
    monkeypatch.setattr(devices, "copy_from_host", copied)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.home)
    monkeypatch.setattr(torch.cuda, "Stream", made.new)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(prefetch, "staging_on", prefetch.CudaStaging)
    return made


TENSORS = {
    "a": torch.arange(48, dtype=torch.int32).reshape(8, 6),
    "b": torch.randn(3, 5).half(),
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.randint(255, (1, 90)).to(torch.uint8),
}


def stored(kind: str, folder: Path) -> Any:
    """The tensors in a storage that reads many pieces at once, or one by one."""
    if kind == "memory":
        return MemoryStorage(TENSORS)
    save_file(TENSORS, folder / "model.safetensors")
    return SafetensorsStorage(folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["memory", "files"])
@pytest.mark.parametrize("run", [128, 192, 1 << 12])
def test_tensors_come_whole_and_in_runs(streams: Streams, tmp_path: Path, kind: str, run: int) -> None:
    with stored(kind, tmp_path) as storage, prefetch.Prefetcher(storage, DEVICE, run) as reader:
        index = (slice(1, 7), slice(2, 4))
        begun = reader.begin([*((name, ()) for name in TENSORS), ("a", index)], storage)

        for name, want in TENSORS.items():
            got = begun.take(name, ())
            assert got is not None
            assert_same_bits(got, want)
        cut = begun.take("a", index)
        assert cut is not None
        assert_same_bits(cut, TENSORS["a"][index])
        assert begun.take("a", index) is None


def test_copies_wait_for_memory_and_for_buffers(streams: Streams) -> None:
    storage = MemoryStorage({str(i): torch.full((64,), i, dtype=torch.uint8) for i in range(6)})
    with prefetch.Prefetcher(storage, DEVICE, 128) as reader:
        begun = reader.begin([(str(i), ()) for i in range(6)], storage)
        taken = [begun.take(str(i), ()) for i in range(6)]

    assert [int(tensor[0]) for tensor in taken if tensor is not None] == list(range(6))
    turn = ["buffer is free", streams.home, "2 copies", "point"]
    for own in streams.own:
        start, work, end = own.log[:2], own.log[2:-1], own.log[-1]
        assert (start, end) == (["point", "point"], "all is done")  # of two buffers
        assert work == turn * (len(work) // len(turn))
    waits = [entry for entry in streams.home.log if isinstance(entry, Stream)]
    assert len(waits) == 3  # one for each run of two tensors, however many tensors it has


def test_threads_stand_on_the_device_that_the_caller_meant(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, torch.device] = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: told.update({threading.current_thread().name: device})
    )
    storage = MemoryStorage(TENSORS)
    with prefetch.Prefetcher(storage, torch.device("cpu"), 1 << 12) as reader:
        reader.begin([("a", ())], storage).close()

    assert list(told.values()) == [streams.home.device]
    assert all(name.startswith("qload-read") for name in told)
