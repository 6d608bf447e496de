"""Conversion by several processes: the same files, after an interruption of any process."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from qload import convert, diff, shard
from qload.conversion import Conversion
from qload.conversion.atomic_folder import AtomicFolder
from qload.conversion.targets import ConversionRequest
from qload.errors import ArgumentError
from qload.parallel import ProcessGroup
from qload.testing import make_checkpoint
from tests.conversion import crews
from tests.paths import FIXTURES, ROOT
from tests.support import torchrun

SMALL = 40_000  # bytes of a file
MODEL = FIXTURES / "models" / "gptq_mixtral"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_checkpoint("gptq", tmp_path / "in")
    return tmp_path / "in"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def unfinished(tmp_path: Path) -> Path:
    return tmp_path / ".out.qload-unfinished"


@pytest.mark.parametrize("size", [2, 3])
def test_they_write_what_one_writes(
    size: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = convert(source, tmp_path / "alone", to="awq", shard_size=SMALL)
    wrote: dict[str, int] = {}
    complete = AtomicFolder.complete

    def completing(folder: AtomicFolder, name: str) -> None:
        assert wrote.setdefault(name, folder.workers.group.rank()) == folder.workers.group.rank()
        complete(folder, name)

    monkeypatch.setattr(AtomicFolder, "complete", completing)
    found = crews.run(
        size,
        lambda group: convert(
            source, tmp_path / "out", to="awq", shard_size=SMALL, process_group=group
        ).to_json(),
        monkeypatch,
    )

    assert found == [{**alone.to_json(), "folder": str(tmp_path / "out")}] * size
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert {rank for name, rank in wrote.items() if name.endswith(".safetensors")} == {*range(size)}
    assert not unfinished(tmp_path).exists()


def interrupt(after: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run two processes; interrupt the second after this number of complete files."""
    complete, count = AtomicFolder.complete, [0]

    def completing(folder: AtomicFolder, name: str) -> None:
        if not folder.workers.is_first:
            if count[0] == after:
                raise KeyboardInterrupt
            count[0] += 1
        complete(folder, name)

    with monkeypatch.context() as patched:
        patched.setattr(AtomicFolder, "complete", completing)
        found = crews.run(
            2,
            lambda group: convert(source, tmp_path / "out", to="awq", shard_size=SMALL, process_group=group),
            monkeypatch,
        )
    assert [type(each) for each in found] == [threading.BrokenBarrierError, KeyboardInterrupt]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("after", [0, 2])
def test_one_that_ends_leaves_all_files_that_both_completed(
    after: int, size: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "alone", to="awq", shard_size=SMALL)
    interrupt(after, source, tmp_path, monkeypatch)
    there = {path.name: path.stat().st_ino for path in unfinished(tmp_path).glob("*.safetensors")}
    assert len(there) > after

    def convert_again(group: ProcessGroup) -> str:
        options = {} if size == 1 else {"process_group": group}
        return convert(source, tmp_path / "out", to="awq", shard_size=SMALL, **options).verdict

    assert crews.run(size, convert_again, monkeypatch) == ["ok"] * size
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in there} == there


def test_what_a_second_process_of_another_run_still_writes_is_not_touched(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(1, source, tmp_path, monkeypatch)
    with (unfinished(tmp_path) / "qload-lock-1").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ArgumentError, match="locked by another process"):
            convert(source, tmp_path / "out", to="awq", shard_size=SMALL)


def test_processes_that_see_other_files_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(source, tmp_path / "other")
    os.utime(tmp_path / "other" / "model.safetensors", ns=(1, 1))
    places = [source, tmp_path / "other"]

    _, refused = crews.run(
        2,
        lambda group: convert(places[group.rank()], tmp_path / "out", to="awq", process_group=group),
        monkeypatch,
    )

    assert isinstance(refused, ArgumentError)
    assert "same files and arguments in all processes" in str(refused)


def test_values_are_looked_at_by_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    lost = ConversionRequest._lost_value
    monkeypatch.setattr(
        ConversionRequest, "_lost_value", lambda self, layer: asked.append(layer.prefix) or lost(self, layer)
    )

    found = crews.run(
        2,
        lambda group: convert(MODEL, tmp_path / "out", to="bfloat16", rounding=True, process_group=group),
        monkeypatch,
    )

    assert all(isinstance(each, Conversion) and each.verdict == "ok" for each in found)
    assert len(asked) == len(set(asked)) > 1


def test_a_refusal_is_that_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = convert(MODEL, tmp_path / "out", to="bfloat16")

    found = crews.run(
        2, lambda group: convert(MODEL, tmp_path / "out", to="bfloat16", process_group=group), monkeypatch
    )

    assert alone.verdict == "findings"
    assert found == [alone, alone]
    assert not unfinished(tmp_path).exists()


def test_shares_of_ranks_are_written_by_several(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard(source, tmp_path / "alone", tp=2, shard_size=SMALL)

    found = crews.run(
        2,
        lambda group: shard(source, tmp_path / "out", tp=2, shard_size=SMALL, process_group=group).verdict,
        monkeypatch,
    )

    assert found == ["ok", "ok"]
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_two_checkpoints_are_compared_by_several(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "awq", to="awq")

    found = crews.run(2, lambda group: diff(source, tmp_path / "awq", process_group=group), monkeypatch)

    assert found == [diff(source, tmp_path / "awq")] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [["convert", "--to", "awq", "--shard-size", "0.00004"], ["diff"], ["plan", "--tp", "2"], ["explain"]],
    ids=lambda verb: verb[0],
)
def test_under_torchrun_one_answer_is_printed(verb: list[str], source: Path, tmp_path: Path) -> None:
    said = []
    for count in (1, 2):
        place = {"convert": ["-o", str(tmp_path / f"out{count}")], "diff": [str(source)]}
        arguments = [verb[0], str(source), *place.get(verb[0], []), *verb[1:], "--json"]
        ended = torchrun.ended(count, "-m", "qload", *arguments)
        said.append({**json.loads(ended.stdout), "folder": ""})

    assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_all_and_the_same_command_goes_on(
    victim: int, source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "alone", to="awq", shard_size=SMALL)
    verb = ["-m", "qload", "convert", str(source), "--to", "awq", "-o", str(tmp_path / "out")]
    verb += ["--shard-size", str(SMALL / 1e9)]
    said = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(torchrun.command(2, *verb), cwd=ROOT, env=torchrun.environment(), **said)
    while not unfinished(tmp_path).exists() and process.poll() is None:
        time.sleep(0.001)
    time.sleep(random.random() / 10)
    ranks = _ranks(process.pid)
    if victim in ranks:
        os.kill(ranks[victim], signal.SIGKILL)
    process.communicate(timeout=torchrun.SECONDS)

    assert (tmp_path / "out").exists() or torchrun.ended(1, *verb).returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def _ranks(launcher: int) -> dict[int, int]:
    """Return the processes of torchrun by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for pid in map(int, children):
        said = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(each[5:]): pid for each in said if each.startswith(b"RANK=")}
    return found
