"""A folder that has its name only once all of it is there, and goes on where it was left before."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from qload.errors import ArgumentError

STATE, LOCK = "qload-unfinished.json", "qload-lock"
BLOCK = 1 << 20  # bytes


class UnfinishedFolder:
    """Files, or folders of files, beside the `target`, until `finish` gives them its name.

    `job`: what is being written, by which another run knows its own; `done`: the files that are complete,
    with the hash of each.
    """

    def __init__(self, target: Path, job: str) -> None:
        self.target, self.job = target, job
        self.done: dict[str, str] = {}

    @property
    def path(self) -> Path:
        """Where it is until it is finished."""
        return self.target.with_name(f".{self.target.name}.qload-unfinished")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """For this process alone; what an earlier run of the same job has completed is in `done`."""
        check_target(self.target)
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                got = f"{self.path}, which another process is writing"
                raise ArgumentError("folder", "one that nobody writes", got) from error
            self._resume()
            yield

    def check_space(self, nbytes: int) -> None:
        """ArgumentError where the disk has fewer bytes left than are still to be written."""
        there = sum((self.path / name).stat().st_size for name in self.done)
        free = shutil.disk_usage(self.path).free
        if nbytes - there > free:
            expected = f"a disk with {nbytes - there} bytes left"
            raise ArgumentError("folder", expected, f"{free} bytes at {self.path.parent}")

    def complete(self, name: str) -> None:
        """A file that was written under the name of `part` has its own from now on."""
        part = self.part(name)
        with part.open("rb") as file:
            digest = hashed(file.fileno())
            os.fsync(file.fileno())
        part.rename(self.path / name)
        self.done[name] = digest
        self._save()

    def part(self, name: str) -> Path:
        """Where a file is written before it is complete; its folder is made."""
        path = self.path / f"{name}.part"
        path.parent.mkdir(exist_ok=True)
        return path

    def write(self, name: str, content: bytes) -> None:
        """A small file, completed at once."""
        self.part(name).write_bytes(content)
        self.complete(name)

    def finish(self) -> None:
        """Give it its name: from one moment to the next all is there."""
        for own in (STATE, LOCK):
            (self.path / own).unlink()
        for folder in {(self.path / name).parent for name in self.done} | {self.path}:
            _sync(folder)
        if self.target.exists():
            self.target.rmdir()  # it was empty, and is refused if it is not any more
        self.path.rename(self.target)
        _sync(self.target.parent)

    def discard(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self.path)

    def _resume(self) -> None:
        state = self.path / STATE
        if state.exists():
            try:
                told = json.loads(state.read_bytes())
            except ValueError:
                told = None
            if not isinstance(told, dict) or told.get("job") != self.job:
                got = f"{self.path}, which was left by another one"
                raise ArgumentError("folder", "one where nothing or the same conversion was begun", got)
            self.done = told["done"]
        for file in self.path.rglob("*"):
            name = file.relative_to(self.path).as_posix()
            if not file.is_dir() and name not in self.done and name not in (STATE, LOCK):
                file.unlink()
        self._save()

    def _save(self) -> None:
        state = self.path / f"{STATE}.part"
        state.write_text(json.dumps({"job": self.job, "done": self.done}))
        state.rename(self.path / STATE)


def check_target(target: Path) -> None:
    """A folder that is not there, or is empty, and whose parent can be made; else ArgumentError."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ArgumentError("folder", "one that is empty, or not there", str(target))


def hashed(descriptor: int) -> str:
    """The SHA-256 of a file from its first byte on."""
    digest, at = sha256(), 0
    block = memoryview(bytearray(BLOCK))  # one for all, which stays in the processor's cache
    while count := os.preadv(descriptor, [block], at):
        digest.update(block[:count])
        at += count
    return digest.hexdigest()


def hashed_file(path: Path) -> str:
    """The SHA-256 of a file by its name."""
    with path.open("rb") as file:
        return hashed(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
