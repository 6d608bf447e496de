"""Files to a CUDA device by threads of the module: here a module that reads when it is waited for."""

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload import MemoryStorage, SafetensorsStorage, Weights, load_layers, loader_from_config, native
from qload.devices import cuda
from qload.testing import assert_same_bits
from qload.weights import prefetch

pytestmark = pytest.mark.usefixtures("seen_logs")

DEVICE = torch.device("cpu")


class Stream:
    """One that nothing is asked of."""

    device, cuda_stream = DEVICE, 7

    def record_event(self) -> "Stream":
        return self

    def synchronize(self) -> None:
        """At once."""


class Module:
    """What the CUDA module has, and what it was asked; `answer`: what a ticket gets instead of bytes."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[int, int, int, int, int, int]]] = []
        self.open: set[int] = set()  # tickets that nobody has waited for
        self.closed, self.homes, self.streams = 0, set[int](), set[int]()
        self.answer: Callable[[int], tuple[int, int, str] | None] = lambda ticket: None
        module = self

        class FileReader:
            buffers = 3

            def __init__(self, memory: int, run: int, threads: int) -> None:
                assert memory
                assert (run, threads) == (cuda.READ_BYTES, cuda.THREADS)

            def begin(self, ranges: Sequence[tuple[int, int, int, int, int, int]], home: int) -> int:
                module.homes.add(home)
                module.asked.append(list(ranges))
                module.open.add(len(module.asked) - 1)
                return len(module.asked) - 1

            def wait(self, ticket: int, stream: int) -> tuple[int, int, str]:
                module.open.remove(ticket)
                module.streams.add(stream)
                told = module.answer(ticket)
                if told is not None:
                    return told
                for descriptor, begin, nbytes, to, runs, distance in module.asked[ticket]:
                    for run in range(runs):
                        read = os.pread(descriptor, nbytes, begin + run * distance)
                        assert len(read) == nbytes
                        ctypes.memmove(to + run * nbytes, read, nbytes)
                return -1, 0, ""

            def close(self) -> None:
                module.closed += 1

        self.FileReader = FileReader


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """A CUDA landing whose device is the CPU, and a module that reads to it."""
    made, stream = Module(), Stream()
    monkeypatch.setattr(cuda, "load", lambda name: SimpleNamespace(found=made))
    monkeypatch.setattr(cuda, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(cuda, "READ_BYTES", 1 << 8)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(prefetch, "staging_on", prefetch.CudaStaging)
    monkeypatch.setattr(prefetch.CudaStaging, "fill", _fill)
    return made


def _fill(self: prefetch.CudaStaging, storage: Any, pieces: Any, ready: Any) -> None:
    prefetch.HostStaging().fill(storage, pieces, None)


@pytest.fixture(autouse=True)
def wait_for_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch.CudaStaging, "wait", lambda self, filled: None)


TENSORS = {
    "a": torch.arange(48, dtype=torch.int32).reshape(8, 6),
    "b": torch.randn(3, 5).half(),
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.empty(0, 4),
    "e": torch.randint(255, (1, 900)).to(torch.uint8),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def asked(*more: tuple[str, tuple[slice, ...]]) -> list[tuple[str, tuple[slice, ...]]]:
    return [*((name, ()) for name in TENSORS), *more]


def bits(got: Tensor | None, want: Tensor) -> None:
    assert got is not None
    assert_same_bits(got, want)


def opened(storage: SafetensorsStorage) -> list[int]:
    """How many readers each open file has."""
    return [file.users for file in storage._open._open.values()]


def test_all_that_lies_in_one_run_is_asked_of_the_module_at_once(module: Module, folder: Path) -> None:
    rows, columns = (slice(1, 7),), (slice(0, 8), slice(2, 4))
    with SafetensorsStorage(folder) as storage, prefetch.Prefetcher(storage, DEVICE) as reader:
        begun = reader.begin(asked(("a", rows), ("a", columns)), storage)

        assert opened(storage) == [1]
        for name, want in TENSORS.items():
            if want.numel():
                bits(begun.take(name, ()), want)
        bits(begun.take("a", rows), TENSORS["a"][rows])
        bits(begun.take("a", columns), TENSORS["a"][columns])
        assert begun.take("a", rows) is None
        assert opened(storage) == [0]
        assert storage.bytes_read == sum(each.nbytes for each in TENSORS.values()) + 6 * 24 + 8 * 8

    sizes = sorted(nbytes for _, _, nbytes, *_ in module.asked[0])
    assert (len(module.asked), sizes) == (1, sorted([192, 30, 8, 900, 144]))
    assert module.closed == 1
    assert (module.homes, module.streams) == ({7}, {7})


def test_slices_with_gaps_are_asked_of_the_module_by_their_runs(module: Module, tmp_path: Path) -> None:
    """Unless the runs are short, or at unequal distances."""
    kept = {"w": torch.randint(255, (4, 3, 2048)).to(torch.uint8), "short": torch.randint(9, (64, 128))}
    save_file(kept, tmp_path / "model.safetensors")
    every = slice(0, 4)
    slices: dict[str, tuple[slice, ...]] = {
        "columns": (every, slice(0, 3), slice(512, 1024)),
        "rows": (slice(1, 3), slice(1, 3), slice(0, 2048)),
        "unequal": (every, slice(0, 2), slice(0, 512)),
        "one row": (slice(2, 3), slice(1, 2), slice(3, 9)),
    }
    with SafetensorsStorage(tmp_path) as storage, prefetch.Prefetcher(storage, DEVICE) as reader:
        narrow = slice(0, 64), slice(0, 63)
        wanted = [*(("w", index) for index in slices.values()), ("short", narrow)]
        begun = reader.begin(wanted, storage)

        for name, index in wanted:
            bits(begun.take(name, index), kept[name][index])
        assert storage.bytes_read == sum(kept[name][index].nbytes for name, index in wanted)

    runs = [(nbytes, count, distance) for _, _, nbytes, _, count, distance in module.asked[0]]
    assert runs == [(512, 12, 2048), (4096, 2, 6144), (6, 1, 0)]


@pytest.mark.parametrize("answer", [(1, 5, ""), (0, 0, ""), (2, 0, "out of order")])
def test_what_the_module_could_not_read_the_load_reads_itself(
    module: Module, folder: Path, answer: tuple[int, int, str], caplog: pytest.LogCaptureFixture
) -> None:
    module.answer = lambda ticket: answer
    with SafetensorsStorage(folder) as storage, prefetch.Prefetcher(storage, DEVICE) as reader:
        begun = reader.begin(asked(), storage)

        assert all(begun.take(name, ()) is None for name in TENSORS)
        assert (opened(storage), storage.bytes_read) == ([0], 0)

    assert ("out of order" in caplog.text) == (answer[2] != "")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_file_that_is_replaced_is_not_believed(module: Module, folder: Path, when: str) -> None:
    file = folder / "model.safetensors"
    with SafetensorsStorage(folder) as storage, prefetch.Prefetcher(storage, DEVICE) as reader:
        if when == "before":
            os.utime(file, ns=(1, 1))
        begun = reader.begin(asked(), storage)
        if when == "meanwhile":
            os.utime(file, ns=(1, 1))

        assert all(begun.take(name, ()) is None for name in TENSORS)
        assert set(opened(storage)) <= {0}
    assert len(module.asked) == (when == "meanwhile")


def test_files_stay_open_until_their_ticket_was_waited_for(module: Module, folder: Path) -> None:
    storage = SafetensorsStorage(folder)
    with prefetch.Prefetcher(storage, DEVICE) as reader:
        first, second = (reader.begin([("a", ())], storage) for _ in range(2))
        assert opened(storage) == [2]
        first.close()
        storage.close()
        assert opened(storage) == [1]

        bits(second.take("a", ()), TENSORS["a"])

        assert opened(storage) == []


def test_what_nobody_waited_for_is_let_go_once_the_threads_have_ended(module: Module, folder: Path) -> None:
    with SafetensorsStorage(folder) as storage:
        with prefetch.Prefetcher(storage, DEVICE) as reader:
            reader.begin(asked(), storage)
            os.utime(folder / "model.safetensors", ns=(1, 1))
            assert opened(storage) == [1]

        assert (module.closed, module.open, opened(storage)) == (1, {0}, [0])


def test_more_files_than_are_kept_open_are_left_to_other_threads(
    module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MAX_OPEN_FILES", 2)
    for i in range(3):
        save_file({str(i): torch.full((5,), i)}, tmp_path / f"{i}.safetensors")
    with SafetensorsStorage(tmp_path) as storage, prefetch.Prefetcher(storage, DEVICE) as reader:
        begun = [reader.begin([(str(i), ())], storage) for i in range(3)]
        begun[0].close()
        begun += [reader.begin([(str(i), ())], storage) for i in (1, 2)]

        for each, i in zip(begun[1:], (1, 2, 1, 2), strict=True):
            bits(each.take(str(i), ()), torch.full((5,), i))

    assert len(module.asked) == 4


@pytest.mark.parametrize("without", ["files", "module", "reader"])
def test_where_nothing_reads_files_threads_of_python_do(
    module: Module, folder: Path, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage: Any = MemoryStorage(TENSORS) if without == "files" else SafetensorsStorage(folder)
    if without == "reader":
        del module.FileReader
    with (
        native.reference() if without == "module" else nullcontext(),
        storage,
        prefetch.Prefetcher(storage, DEVICE) as reader,
    ):
        bits(reader.begin(asked(), storage).take("a", ()), TENSORS["a"])

    assert not module.asked


def test_where_no_memory_is_pinned_threads_of_python_read(
    module: Module, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int) -> Tensor:
        raise RuntimeError(f"cannot pin {nbytes} bytes")

    monkeypatch.setattr(cuda, "pinned", refuse)
    with SafetensorsStorage(folder) as storage, prefetch.Prefetcher(storage, DEVICE) as reader:
        bits(reader.begin(asked(), storage).take("a", ()), TENSORS["a"])

    assert "cannot pin 6144 bytes" in caplog.text
    assert not module.asked


def test_layers_of_a_stream_are_those_one_by_one(
    module: Module, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which every other ticket fails."""
    tensors = {f"{i}.weight": torch.randn(16, 8) for i in range(9)}
    save_file(tensors, tmp_path / "model.safetensors")
    turns = count()
    module.answer = lambda ticket: (0, 5, "") if next(turns) % 2 else None
    with caplog.at_level(logging.WARNING, "qload"), SafetensorsStorage(tmp_path) as storage:
        weights = Weights(storage, loader=loader_from_config(None))

        made = dict(load_layers(weights))

        assert not opened(storage)[1:]
        assert opened(storage) == [0]
    assert len(module.asked) == len(tensors)
    assert not module.open
    assert not caplog.text
    for name, tensor in tensors.items():
        bits(made[name.removesuffix(".weight")].fields()["weight"], tensor)


def test_a_subclass_of_the_storage_may_read_otherwise(module: Module, folder: Path) -> None:
    class Own(SafetensorsStorage):
        """With a `read_into` of its own, perhaps."""

    with Own(folder) as storage, prefetch.Prefetcher(storage, DEVICE) as reader:
        bits(reader.begin(asked(), storage).take("a", ()), TENSORS["a"])

    assert not module.asked
