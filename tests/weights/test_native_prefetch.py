"""What threads of the CPU module read before its turn: what one by one is read, or not used."""

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload import SafetensorsStorage, Weights, native
from qload.detect import loader_from_config
from qload.devices import CpuFileMover
from qload.errors import StorageError
from qload.testing import assert_same_bits
from qload.weights import prefetch
from qload.weights.prefetch import OpenedFiles

has_native = pytest.mark.usefixtures("cpu_module")
TENSORS = {
    **{f"{n}.weight": torch.randn(16 + n, 8) for n in range(8)},
    "8.weight": torch.randn(3, 5).half(),
    "9.weight": torch.randn(600, 900),
}
NAMES = [name.removesuffix(".weight") for name in TENSORS]


def saved(path: Path, files: int = 1) -> Path:
    for n in range(files):
        part = {name: each for turn, (name, each) in enumerate(TENSORS.items()) if turn % files == n}
        save_file(part, path / f"{n}.safetensors")
    return path


def streamed(folder: Path) -> dict[str, Tensor]:
    """All layers, each of which has to be what it is by itself, of a ledger that says the same."""
    with SafetensorsStorage(folder) as one, SafetensorsStorage(folder) as other:
        first, second = (Weights(each, loader=loader_from_config(None)) for each in (one, other))
        found = {name: weight.dequantize() for name, weight in first.stream(NAMES)}
        for name in NAMES:
            assert_same_bits(found[name], second.get_weights(name).dequantize())
        assert first.report() == second.report()
    return found


@pytest.fixture
def tickets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were asked for by each ticket."""
    found: list[int] = []
    inner = CpuFileMover.begin

    def told(self: CpuFileMover, moves: list[object]) -> int:
        found.append(len(moves))
        return inner(self, moves)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuFileMover, "begin", told)
    return found


@has_native
@pytest.mark.parametrize("files", [1, 3])
def test_layers_of_a_stream_are_read_by_threads_of_the_module(
    tmp_path: Path, tickets: list[int], files: int
) -> None:
    found = streamed(saved(tmp_path, files))

    for name in NAMES:
        assert_same_bits(found[name], TENSORS[f"{name}.weight"].to(found[name].dtype))
    assert tickets == [1] * len(NAMES)


@has_native
def test_what_they_could_not_read_a_load_reads_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there then is not used."""
    inner, turns = CpuFileMover.wait, count()

    def fails(self: CpuFileMover, ticket: int) -> list[bool]:
        targets = self._targets[ticket]
        made = inner(self, ticket)
        if next(turns) % 2:
            return made
        for target in targets:
            target.fill_(3)
        return [False for _ in made]

    monkeypatch.setattr(CpuFileMover, "wait", fails)
    found = streamed(saved(tmp_path))

    for name in NAMES:
        assert_same_bits(found[name], TENSORS[f"{name}.weight"].to(found[name].dtype))
    assert next(turns) == len(NAMES)


@pytest.mark.usefixtures("seen_texts")
@has_native
def test_a_file_that_is_replaced_while_they_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many bytes, so that every read succeeds."""
    inner, file = CpuFileMover.wait, saved(tmp_path) / "0.safetensors"

    def replaced(self: CpuFileMover, ticket: int) -> list[bool]:
        made = inner(self, ticket)
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
        return made

    monkeypatch.setattr(CpuFileMover, "wait", replaced)
    with SafetensorsStorage(tmp_path) as storage, pytest.raises(StorageError, match="replaced"):
        list(Weights(storage, loader=loader_from_config(None)).stream(NAMES))


@has_native
def test_more_files_than_are_kept_open_are_read_by_threads_of_python(
    tmp_path: Path, tickets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MAX_OPEN_FILES", 2)
    streamed(saved(tmp_path, len(NAMES)))

    assert 2 <= len(tickets) < len(NAMES)


@has_native
def test_who_ends_a_stream_early_waits_for_them(tmp_path: Path) -> None:
    """After which all files are closed, and nothing is held."""
    with SafetensorsStorage(saved(tmp_path)) as storage:
        found = Weights(storage, loader=loader_from_config(None)).stream(NAMES)
        next(found)
        users = [opened.users for opened in storage.ranges.files._open.values()]
        found.close()  # type: ignore[attr-defined]

        assert users > [0]
        assert [opened.users for opened in storage.ranges.files._open.values()] == [0]


@pytest.mark.usefixtures("seen_texts")
@has_native
def test_who_is_interrupted_while_waiting_is_told_just_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each point where an interrupt can come: what was waited for is waited for again, and not used."""
    inner, close = CpuFileMover.wait, OpenedFiles.close

    def waits(self: CpuFileMover, ticket: int) -> list[bool]:
        inner(self, ticket)
        raise KeyboardInterrupt

    def closes(self: OpenedFiles) -> bool:
        close(self)
        raise KeyboardInterrupt

    for owner, name, interrupted in ((CpuFileMover, "wait", waits), (OpenedFiles, "close", closes)):
        with SafetensorsStorage(saved(tmp_path)) as storage, monkeypatch.context() as patch:
            found = Weights(storage, loader=loader_from_config(None)).stream(NAMES)
            next(found)
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(found)


@has_native
@pytest.mark.parametrize("answer", [[], [True], [True, False], [False, True]])
def test_of_moves_begun_together_one_that_failed_fails_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: list[bool]
) -> None:
    inner = CpuFileMover.wait

    def waits(self: CpuFileMover, ticket: int) -> list[bool]:
        inner(self, ticket)
        return answer

    monkeypatch.setattr(CpuFileMover, "wait", waits)
    with (
        SafetensorsStorage(saved(tmp_path)) as storage,
        prefetch.Prefetcher(storage, torch.device("cpu")) as it,
    ):
        begun = it.begin([("0.weight", ()), ("1.weight", ())], storage)

        assert begun.take("0.weight", ()) is None
        assert begun.take("1.weight", ()) is None


@pytest.mark.skipif(not native.available(), reason="a process of its own has no module by hand")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not copied here")
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_copy_of_the_process_ends_its_stream_or_goes_on_with_it(tmp_path: Path, goes_on: bool) -> None:
    """In a process of its own, as a test runner has threads that a copy would lack."""
    said = f"""
import os, torch
from qload import SafetensorsStorage, Weights
from qload.detect import loader_from_config
storage = SafetensorsStorage({str(saved(tmp_path))!r})
stream = Weights(storage, loader=loader_from_config(None)).stream({NAMES!r})
next(stream)
child = os.fork()
if not child:
    held = [weight.dequantize() for _, weight in stream] if {goes_on} else []
    stream.close()
    os._exit(len(held))
_, ended = os.waitpid(child, 0)
rest = [weight.dequantize() for _, weight in stream]
print(os.waitstatus_to_exitcode(ended), len(rest))
"""
    found = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=120)

    rest = len(NAMES) - 1
    assert found.stdout.split() == [str(rest if goes_on else 0), str(rest)], found.stderr


@has_native
def test_memory_is_that_of_the_cpu_whatever_torch_makes_by_default(
    tmp_path: Path, tickets: list[int]
) -> None:
    with torch.device("meta"):
        streamed(saved(tmp_path))

    assert len(tickets) == len(NAMES)


@pytest.mark.parametrize("without", ["native code", "a device of the CPU"])
def test_elsewhere_threads_of_python_read(tmp_path: Path, without: str) -> None:
    device = torch.device("meta" if without == "a device of the CPU" else "cpu")
    with SafetensorsStorage(saved(tmp_path)) as storage:
        if without == "native code":
            with native.reference(), prefetch.Prefetcher(storage, device) as reader:
                assert reader.native is None
        else:
            assert prefetch.native_reader(storage, device, 2) is None


def test_files_are_closed_once_whoever_asks_again(tmp_path: Path) -> None:
    """As one does who was interrupted: nothing is said then of what was read, and others keep theirs."""
    with SafetensorsStorage(saved(tmp_path)) as storage:
        files = prefetch.FilePool(storage.ranges)
        one, other = (files.open(["0.safetensors"]) for _ in range(2))
        assert one is not None
        assert other is not None

        assert [one.close(), one.close(), other.close()] == [True, False, True]


ROWS = {f"{n}.codes": torch.randint(-(2**31), 2**31, (6, 40), dtype=torch.int32) for n in range(5)}
INDICES = pytest.mark.parametrize(
    ("index", "is_whole_run"),
    [((), True), ((slice(2, 5),), True), ((slice(None), slice(4, 12)), False)],
    ids=["whole", "some rows", "some columns"],
)


def refuse(self: SafetensorsStorage, asked: object) -> None:
    raise AssertionError("a read without threads")


@has_native
@INDICES
@pytest.mark.parametrize("files", [1, 3])
def test_rows_of_several_tensors_are_one_job(
    index: tuple[slice, ...],
    is_whole_run: bool,
    files: int,
    tickets: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetch, "MIN_SHARED_BYTES", 0)
    for n in range(files):
        part = {name: each for turn, (name, each) in enumerate(ROWS.items()) if turn % files == n}
        save_file(part, tmp_path / f"{n}.safetensors")
    want = torch.stack([each[index] for each in ROWS.values()])
    wide = torch.zeros(*want.shape[:2], 2 * want.shape[2], dtype=torch.int32)  # two of them side by side
    rows, columns = torch.zeros_like(want), wide.narrow(2, want.shape[2], want.shape[2])

    if is_whole_run:
        monkeypatch.setattr(SafetensorsStorage, "read_rows", refuse)

    with SafetensorsStorage(tmp_path) as storage:
        weights = Weights(storage, loader=loader_from_config(None))
        weights.read_rows([([*ROWS], index, rows), ([*ROWS], index, columns)])
        assert storage.bytes_read == 2 * want.nbytes

    assert tickets == ([2 * len(ROWS)] if is_whole_run else [])
    assert_same_bits(rows, want)
    assert_same_bits(columns.contiguous(), want)
    assert not wide.narrow(2, 0, want.shape[2]).any()


@has_native
def test_rows_that_threads_could_not_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MIN_SHARED_BYTES", 0)
    save_file(ROWS, tmp_path / "model.safetensors")
    out = torch.zeros(len(ROWS), 6, 40, dtype=torch.int32)
    inner = CpuFileMover.wait

    def wait(self: CpuFileMover, ticket: int) -> list[bool]:
        moved = inner(self, ticket)
        out[-1] = 0
        return [*moved[:-1], False]

    monkeypatch.setattr(CpuFileMover, "wait", wait)

    with SafetensorsStorage(tmp_path) as storage:
        Weights(storage, loader=loader_from_config(None)).read_rows([([*ROWS], (), out)])

    assert_same_bits(out, torch.stack([*ROWS.values()]))


@has_native
def test_a_forked_process_reads_without_the_threads_of_its_parent(
    tmp_path: Path, tickets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuFileMover, "is_here", property(lambda self: False))

    streamed(saved(tmp_path))

    assert tickets == []
