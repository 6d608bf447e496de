"""Interrupted, concurrent and incorrect conversions."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qload import convert
from qload.conversion.atomic_folder import AtomicFolder
from qload.errors import ArgumentError
from qload.testing import make_checkpoint
from tests.conversion.interruption import interrupted
from tests.paths import ROOT

BEFORE = ("headers", "checking layers")  # stages of progress without a read of weights
SMALL = 40_000  # bytes of a file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_checkpoint("gptq", tmp_path / "in")
    return tmp_path / "in"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def unfinished(tmp_path: Path) -> Path:
    return tmp_path / ".out.qload-unfinished"


def interrupt(after: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a run after this number of complete files."""
    with interrupted(after, monkeypatch):
        convert(source, tmp_path / "out", to="awq", shard_size=SMALL)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_it_goes_on_where_it_was_and_writes_the_same(
    after: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "whole", to="awq", shard_size=SMALL)
    interrupt(after, source, tmp_path, monkeypatch)

    assert not (tmp_path / "out").exists()
    there = {path.name: path.stat().st_ino for path in unfinished(tmp_path).glob("*.safetensors")}
    assert len(there) == after
    assert convert(source, tmp_path / "out", to="awq", shard_size=SMALL).verdict == "ok"
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in there} == there
    assert not unfinished(tmp_path).exists()


@pytest.mark.slow
def test_killed_at_any_moment_there_is_all_of_it_or_nothing(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", to="awq", shard_size=SMALL)
    code = (
        "import sys; from qload import convert; print('begun', flush=True);"
        f"convert(sys.argv[1], sys.argv[2], to='awq', shard_size={SMALL})"
    )
    kills = 0
    for wait in (0.0, 0.05, 0.1):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(source), str(tmp_path / "out")],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        process.stdout.close()
        if (tmp_path / "out").exists():
            break
    assert kills
    if not (tmp_path / "out").exists():
        convert(source, tmp_path / "out", to="awq", shard_size=SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("seen_texts")
def test_what_another_conversion_left_is_not_touched(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(2, source, tmp_path, monkeypatch)
    was = contents(unfinished(tmp_path))
    with pytest.raises(ArgumentError, match="left by another conversion"):
        convert(source, tmp_path / "out", to="marlin", shard_size=SMALL)

    assert contents(unfinished(tmp_path)) == was


@pytest.mark.usefixtures("seen_texts")
def test_a_source_that_changed_meanwhile_is_another_conversion(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(2, source, tmp_path, monkeypatch)
    file = source / "model.safetensors"
    os.utime(file, ns=(1, 1))

    with pytest.raises(ArgumentError, match="left by another conversion"):
        convert(source, tmp_path / "out", to="awq", shard_size=SMALL)


@pytest.mark.usefixtures("seen_texts")
def test_two_processes_do_not_write_one_folder(source: Path, tmp_path: Path) -> None:
    with (
        AtomicFolder(tmp_path / "out", "other").open(),
        pytest.raises(ArgumentError, match="locked by another process"),
    ):
        convert(source, tmp_path / "out", to="awq")


@pytest.mark.usefixtures("seen_texts")
def test_a_state_that_is_none_is_refused(source: Path, tmp_path: Path) -> None:
    unfinished(tmp_path).mkdir()
    (unfinished(tmp_path) / "qload-unfinished-0").write_text("[")

    with pytest.raises(ArgumentError, match="left by another conversion"):
        convert(source, tmp_path / "out", to="awq")


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("taken", ["a file", "a folder with something in it"])
def test_a_target_that_is_taken_is_refused_first(taken: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if taken == "a file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    with pytest.raises(ArgumentError, match="an empty folder"):
        convert(source, target, to="awq")

    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_an_empty_target_is_taken(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    assert convert(source, tmp_path / "out", to="awq").verdict == "ok"
    assert (tmp_path / "out" / "qload-certificate.json").exists()


@pytest.mark.parametrize("there", [True, False], ids=["to an empty folder", "to nothing"])
def test_a_target_may_be_a_link(there: bool, source: Path, tmp_path: Path) -> None:
    if there:
        (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")

    assert convert(source, tmp_path / "out", to="awq").verdict == "ok"
    assert (tmp_path / "real" / "qload-certificate.json").exists()
    assert (tmp_path / "out").is_symlink()
    assert not unfinished(tmp_path).exists()


@pytest.mark.usefixtures("seen_texts")
def test_a_full_disk_is_told_before_a_tensor_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ArgumentError, match=r"a disk with \d+ bytes left"):
        convert(source, tmp_path / "out", to="awq")

    assert not unfinished(tmp_path).exists()


@pytest.mark.usefixtures("seen_texts")
def test_files_that_are_complete_outlive_a_disk_that_is_full_for_the_rest(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(2, source, tmp_path, monkeypatch)
    was = contents(unfinished(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))

    with pytest.raises(ArgumentError, match=r"a disk with \d+ bytes left"):
        convert(source, tmp_path / "out", to="awq", shard_size=SMALL)

    left = contents(unfinished(tmp_path))
    assert {name: left[name] for name in was if name.endswith(".safetensors")} == {
        name: held for name, held in was.items() if name.endswith(".safetensors")
    }


def test_a_disk_with_space_for_what_is_missing_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 80, 20))
    folder = AtomicFolder(tmp_path / "out", "job")
    with folder.open():
        folder.write("a.txt", b"ten  bytes")

        folder.check_space(30)
        with pytest.raises(ArgumentError) as caught:
            folder.check_space(31)

    assert (caught.value.expected, caught.value.got) == (
        "a disk with 21 bytes left",
        f"20 bytes at {tmp_path}",
    )


def test_files_and_folders_are_on_the_disk_before_they_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[str](), os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{tmp_path}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    before = len(os.listdir("/proc/self/fd"))
    folder = AtomicFolder(tmp_path / "out", "job")
    with folder.open():
        folder.write("rank-0/a.txt", b"a")
        folder.write("b.txt", b"b")
        folder.commit()

    written = "/.out.qload-unfinished"
    assert synced[:2] == [f"{written}/rank-0/a.txt.part", f"{written}/b.txt.part"]
    assert sorted(synced[2:4]) == [written, f"{written}/rank-0"]
    assert synced[4:] == [""]
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_reads_back_as_something_else_is_not_handed_out(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flip one bit of the data on disk."""
    complete = AtomicFolder.complete

    def damaging(folder: AtomicFolder, name: str) -> None:
        if name.endswith(".safetensors"):
            content = bytearray(folder.part_path(name).read_bytes())
            content[-9] ^= 1
            folder.part_path(name).write_bytes(content)
        complete(folder, name)

    monkeypatch.setattr(AtomicFolder, "complete", damaging)
    found = convert(source, tmp_path / "out", to="awq")

    assert (found.verdict, found.counts["differs"], found.folder) == ("findings", 1, "")
    assert "first at" in next(layer.detail for layer in found.layers if not layer.well)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_progress_is_told_in_bytes_to_the_end(source: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    convert(source, tmp_path / "out", to="awq", progress=lambda *each: told.append(each))
    writing = [(done, total) for stage, done, total in told if stage == "writing"]

    assert next(stage for stage, *_ in told if stage not in BEFORE) == "writing"
    assert writing[0][0] == 0
    assert writing[-1][0] == writing[-1][1]
    assert json.dumps(told)
