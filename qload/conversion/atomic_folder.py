"""Output folder that is written under a temporary name, can be resumed, and is renamed when complete."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path

from qload.errors import ArgumentError
from qload.errors.exceptions import written_to
from qload.verify.workers import Workers

STATE, LOCK = "qload-unfinished", "qload-lock"
BLOCK = 1 << 20  # bytes


class UnfinishedFolder:
    """Files, or folders of files, beside the `target`, until `finish` gives them its name.

    `job`: what is being written, by which another run knows its own; `crew`: the processes that write it, of
    which each has a lock and a state of its own. `done`: the files that are complete, with the hash of each.
    """

    def __init__(self, target: Path, job: str, crew: Workers | None = None) -> None:
        self.target, self.job = target.resolve(), job  # where a link leads to, as a link is no folder
        self.crew = crew or Workers.of(None)
        self.done: dict[str, str] = {}

    @property
    def path(self) -> Path:
        """Where it is until it is finished."""
        return self.target.with_name(f".{self.target.name}.qload-unfinished")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """For this crew alone; what an earlier run of the same job has completed is in `done`."""
        check_target(self.target)
        with ExitStack() as locks:
            if self.crew.is_first:
                self.path.mkdir(parents=True, exist_ok=True)
                for lock in sorted({self._own(LOCK), *self.path.glob(f"{LOCK}-*")}):
                    self._lock(lock, locks)
                self._resume()
            (job, self.done), *_ = self.crew.gather((self.job, self.done))
            if not self.crew.is_first:
                if job != self.job or not self.path.is_dir():
                    got = f"{self.path}, which is not there, or another one, for process {self._rank}"
                    raise ArgumentError("folder", "files that all processes see, and write alike", got)
                self._lock(self._own(LOCK), locks)
            with written_to(self.path):
                yield

    @property
    def _rank(self) -> int:
        return self.crew.group.rank()

    def _own(self, name: str) -> Path:
        """A file of this process' own."""
        return self.path / f"{name}-{self._rank}"

    def _lock(self, path: Path, locks: ExitStack) -> None:
        file = locks.enter_context(path.open("w"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            got = f"{self.path}, which another process is writing"
            raise ArgumentError("folder", "one that nobody writes", got) from error

    def check_space(self, nbytes: int) -> None:
        """ArgumentError where the disk has fewer bytes left than are still to be written.

        A folder in which nothing was completed yet is removed then.
        """
        there = sum((self.path / name).stat().st_size for name in self.done)
        free = shutil.disk_usage(self.path.parent).free
        if nbytes - there > free:
            if not self.done and self.crew.is_first:
                shutil.rmtree(self.path, ignore_errors=True)
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

    def together(self) -> None:
        """Once each process is here, all know what each has completed."""
        for done in self.crew.gather(self.done):
            self.done |= done

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
        for name in (LOCK, STATE):
            for own in sorted(self.path.glob(f"{name}-*"), reverse=True):
                own.unlink()
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
        """All that every process of an earlier run completed; what they did not is removed."""
        for state in sorted(self.path.glob(f"{STATE}-*")):
            try:
                told = json.loads(state.read_bytes())
            except ValueError:
                told = None
            if not isinstance(told, dict) or told.get("job") != self.job:
                got = f"{self.path}, which was left by another one"
                raise ArgumentError("folder", "one where nothing or the same conversion was begun", got)
            self.done |= told["done"]
        self._save()
        own = {self._own(STATE), self._own(LOCK)}
        for file in self.path.rglob("*"):
            name = file.relative_to(self.path).as_posix()
            if not file.is_dir() and name not in self.done and file not in own:
                file.unlink()

    def _save(self) -> None:
        state = self._own(STATE)
        part = self.path / f"part-of-{state.name}"
        part.write_text(json.dumps({"job": self.job, "done": self.done}))
        part.rename(state)


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
