"""Worlds of real processes, by torchrun and by hand: their answers, their refusals, one that is killed."""

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qload.parallel import ALONE
from qload.testing import assert_same_bits
from tests.parallel.rank import outputs
from tests.paths import ROOT
from tests.support.torchrun import command, environment

STARTING = 300  # seconds in which processes of a busy machine have begun
ENDING = 30  # seconds in which ranks end once another is gone
Process = subprocess.Popen[str]


def begun(processes: int, *arguments: str, **more: str) -> Process:
    """A process, or the launcher of several, its messages in one stream."""
    return subprocess.Popen(
        command(processes, *arguments),
        cwd=ROOT,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def torchrun(world: int, work: str, folder: Path, **more: str) -> list[Process]:
    """The launcher alone, whose ranks are its own."""
    return [begun(world, "-m", "tests.parallel.rank", work, str(folder), **more)]


def by_hand(world: int, work: str, folder: Path, **more: str) -> list[Process]:
    """Plain processes, without a launcher."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}
    return [
        begun(1, "-m", "tests.parallel.rank", work, str(folder), RANK=str(rank), **meeting)
        for rank in range(world)
    ]


LAUNCHERS = {"torchrun": torchrun, "by hand": by_hand}
every_launcher = pytest.mark.parametrize("launcher", LAUNCHERS)


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Processes that end with the test, whatever becomes of it."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
        if process.stdout is not None:
            process.stdout.close()


def until(place: Path) -> None:
    """Wait for a file."""
    last = time.monotonic() + STARTING
    while not place.exists():
        assert time.monotonic() < last, f"no {place.name}"
        time.sleep(0.05)


@pytest.mark.parametrize(("world", "launcher"), [(2, "torchrun"), (4, "torchrun"), (2, "by hand")])
def test_every_rank_has_the_answer_of_one(
    world: int, launcher: str, tmp_path: Path, started: list[Process]
) -> None:
    started += LAUNCHERS[launcher](world, "outputs", tmp_path)
    said = [process.communicate(timeout=STARTING)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), said

    alone = outputs(ALONE)
    alone["largest"] = torch.tensor([world - 1, 0])
    alone["bfloat16"] = torch.full((3,), world * (world + 1) / 2, dtype=torch.bfloat16)
    for rank in range(world):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, want in alone.items():
            assert_same_bits(found[name] + 0, want + 0)  # of two zeros the sign is nobody's promise


@every_launcher
def test_when_one_rank_refuses_all_say_why_before_anything_is_read(
    launcher: str, tmp_path: Path, started: list[Process]
) -> None:
    whole = ROOT / "fixtures" / "gptq" / "b4_g64_sym_noact_v1"
    (tmp_path / "model-0").symlink_to(whole)
    (tmp_path / "model-1").mkdir()

    started += LAUNCHERS[launcher](2, "refuse", tmp_path, VICTIM="-1")
    for process in started:
        process.communicate(timeout=STARTING)

    said = {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    assert len(said) == 1
    assert "model-1" in said.pop()
    assert not any((tmp_path / f"reads-{rank}").exists() for rank in range(2))


def test_a_cut_that_is_unlawful_is_one_sentence_of_all_ranks(tmp_path: Path, started: list[Process]) -> None:
    started += by_hand(2, "cut", tmp_path)
    output = [process.communicate(timeout=STARTING)[0] for process in started]

    said = {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    assert len(said) == 1
    assert said.pop().startswith("DivideError: embed.weight: N = 67 does not divide into 2 ranks")
    assert all("does not divide into 2 ranks" in each for each in output)


@pytest.mark.parametrize(  # each pair of two values
    ("launcher", "work", "victim"),
    [("torchrun", "load", 0), ("torchrun", "wait", 1), ("by hand", "load", 1), ("by hand", "wait", 0)],
)
def test_a_rank_that_is_killed_ends_the_others_with_an_error_of_qload(
    launcher: str, work: str, victim: int, tmp_path: Path, started: list[Process]
) -> None:
    """While the others load, and while they wait for it."""
    started += LAUNCHERS[launcher](2, work, tmp_path, VICTIM=str(victim))
    until(tmp_path / "killed")

    output = [process.communicate(timeout=ENDING)[0] for process in started]

    lost = f"LostRankError: rank {victim} of 2 is lost\n  reason   its process ended"
    assert (tmp_path / f"{1 - victim}.txt").read_text() == lost
    assert f"rank {victim} of 2 is lost" in "".join(output)
    assert all(process.returncode for process in started)


def test_a_rank_that_is_stuck_ends_with_the_error_in_its_log(tmp_path: Path, started: list[Process]) -> None:
    started += by_hand(2, "stuck", tmp_path, VICTIM="0")
    until(tmp_path / "killed")

    output = started[1].communicate(timeout=ENDING)[0]

    assert started[1].returncode == 1
    assert "rank 0 of 2 is lost\n  reason   its process ended" in output
    assert not (tmp_path / "1.txt").exists()  # no error was raised
