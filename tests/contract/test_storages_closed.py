"""Entry points close the storage of a checkpoint after an exception at any step.

A profiler raises an exception at a call of a function of `qload`, at steps between the construction of a
storage and the end of the entry point. Afterwards each constructed storage must be closed.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import qload
from qload import (
    SafetensorsStorage,
    convert,
    diff,
    explain,
    layers,
    open_checkpoint,
    plan,
    shard,
    verify,
)
from qload.cli.main import main
from qload.models import load_model
from qload.pictures import layer_pictures
from qload.testing import make_checkpoint

PACKAGE = str(Path(qload.__file__).parent)
# Functions excluded from exceptions: the storage is about to be closed, or is not constructed yet.
NOT_HERE = {"close", "__enter__", "__exit__", "__init__", "__del__", "_trim"}
STEPS = 12  # for each entry point, at equal ratios between the first call and the last


class EndedHere(BaseException):
    """Exception without a handler in any entry point, like KeyboardInterrupt."""


class Tracked:
    """Constructed storages, and closed storages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[Any] = []
        self.closed: list[int] = []
        construct, close = SafetensorsStorage.__init__, SafetensorsStorage.close

        def constructed(storage: Any, *arguments: Any, **options: Any) -> None:
            construct(storage, *arguments, **options)
            self.opened.append(storage)

        def closed(storage: Any) -> None:
            self.closed.append(id(storage))
            close(storage)

        monkeypatch.setattr(SafetensorsStorage, "__init__", constructed)
        monkeypatch.setattr(SafetensorsStorage, "close", closed)

    @property
    def left(self) -> int:
        """Number of open storages."""
        return sum(id(storage) not in self.closed for storage in self.opened)


class Profiler:
    """Profiler with a count of calls of `qload` while a storage is open, and an exception at one of them."""

    def __init__(self, tracked: Tracked, end_at: int | None) -> None:
        self.tracked, self.end_at, self.calls = tracked, end_at, 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name in NOT_HERE:
            return
        if code.co_flags & CO_GENERATOR:  # the interpreter enters an abandoned generator to close it
            return
        if self.tracked.left:
            self.calls += 1
            if self.calls == self.end_at:
                raise EndedHere

    def run(self, door: Callable[[], object]) -> bool:
        """Run an entry point; return whether the exception ended it."""
        sys.setprofile(self)
        try:
            door()
        except EndedHere:
            return True
        finally:
            sys.setprofile(None)
        return False


Door = Callable[[Path, Path], object]


def command(*words: str) -> Door:
    def run(path: Path, out: Path) -> object:
        places = {"PATH": str(path), "OUT": str(out)}
        return CliRunner().invoke(main, [places.get(word, word) for word in words], catch_exceptions=False)

    return run


def engine(path: Path, _: Path) -> object:
    """Run the reader of transformers; no exception occurs in functions of transformers itself."""
    source = pytest.importorskip("qload.engines.transformers.checkpoint")
    config = pytest.importorskip("qload.engines.transformers").QloadConfig(target="auto")
    return source.CheckpointReader([str(path / "model.safetensors")], config, torch.float32).close()


DOORS: dict[str, Door] = {
    "open_checkpoint": lambda path, _: open_checkpoint(path).storage.close(),
    "open_checkpoint for a target": lambda path, _: open_checkpoint(path, target="auto").storage.close(),
    "inspect": lambda path, _: qload.inspect(path),
    "layers": lambda path, _: list(layers(path)),
    "verify": lambda path, _: verify(path),
    "verify --against": lambda path, _: verify(path, against=path),
    "diff": lambda path, _: diff(path, path),
    "convert": lambda path, out: convert(path, out, to="bfloat16", rounding=True),
    "shard": lambda path, out: shard(path, out, tp=2),
    "plan": lambda path, _: plan(path, tp=2),
    "explain": lambda path, _: explain(path, arch="sm90"),
    "load_model": lambda path, _: load_model(path),
    "layer_pictures": lambda path, _: layer_pictures(path),
    "run": command("run", "PATH", "--prompt-ids", "1,2", "--tokens", "1"),
    "bench-load": command("bench-load", "PATH", "--rounds", "1"),
    "transformers": engine,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed") / "checkpoint"
    make_checkpoint("gptq", folder, model="llama")
    return folder


def steps(calls: int) -> Iterator[int]:
    """Yield distinct steps from 1 to the last call."""
    ratio = calls ** (1 / STEPS)
    yield from sorted({min(calls, round(ratio**step)) for step in range(STEPS + 1)})


@pytest.mark.parametrize("name", DOORS)
def test_a_door_that_is_ended_leaves_no_storage_open(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, tracked = DOORS[name], Tracked(monkeypatch)
    door(checkpoint, tmp_path / "warm")  # import modules and fill caches
    assert tracked.opened
    assert tracked.left == 0
    counted = Profiler(tracked, None)
    counted.run(lambda: door(checkpoint, tmp_path / "counted"))

    left = {}
    for step in steps(counted.calls):
        tracked.opened.clear()
        tracked.closed.clear()
        if Profiler(tracked, step).run(partial(door, checkpoint, tmp_path / str(step))):
            assert tracked.opened
            left[step] = tracked.left

    assert left
    assert {step for step, count in left.items() if count} == set()
