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
HASH_BLOCK_BYTES = 1 << 20


class AtomicFolder:
    """Folder of files that receives its final name once all of them are complete.

    Until then it lies next to `target` as `.NAME.qload-unfinished`. Each process of `workers` has a lock and
    a state file of its own in it. A later run with the same `job` resumes it.

    Parameters
    ----------
    target
        The final path.
    job
        Key of the task; a folder with another key is refused.
    workers
        The processes that write the folder; None: this process alone.

    Attributes
    ----------
    completed
        SHA-256 of each complete file, by its path relative to the folder.
    """

    def __init__(self, target: Path, job: str, workers: Workers | None = None) -> None:
        self.target, self.job = target.resolve(), job  # a link is resolved, as `rename` would replace it
        self.workers = workers or Workers.of(None)
        self.completed: dict[str, str] = {}

    @property
    def path(self) -> Path:
        """The temporary path."""
        return self.target.with_name(f".{self.target.name}.qload-unfinished")

    @contextmanager
    def open(self) -> Iterator[None]:
        """Create or resume the folder, and lock it for the `with` block."""
        check_output_folder(self.target)
        with ExitStack() as locks:
            if self.workers.is_first:
                self.path.mkdir(parents=True, exist_ok=True)
                for lock in sorted({self._own_file(LOCK), *self.path.glob(f"{LOCK}-*")}):
                    self._lock(lock, locks)
                self._resume()
            (job, self.completed), *_ = self.workers.gather((self.job, self.completed))
            if not self.workers.is_first:
                if job != self.job or not self.path.is_dir():
                    got = f"{self.path}, missing or with another job for process {self._rank}"
                    raise ArgumentError("folder", "the same files and arguments in all processes", got)
                self._lock(self._own_file(LOCK), locks)
            with written_to(self.path):
                yield

    @property
    def _rank(self) -> int:
        return self.workers.group.rank()

    def _own_file(self, name: str) -> Path:
        return self.path / f"{name}-{self._rank}"

    def _lock(self, path: Path, locks: ExitStack) -> None:
        file = locks.enter_context(path.open("w"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            got = f"{self.path}, locked by another process"
            raise ArgumentError("folder", "a folder without another writer", got) from error

    def check_space(self, nbytes: int) -> None:
        """Raise ArgumentError if the disk has less space than the missing part of `nbytes`.

        Removes a folder without any complete file first.
        """
        written = sum((self.path / name).stat().st_size for name in self.completed)
        free = shutil.disk_usage(self.path.parent).free
        if nbytes - written > free:
            if not self.completed and self.workers.is_first:
                shutil.rmtree(self.path, ignore_errors=True)
            expected = f"a disk with {nbytes - written} bytes left"
            raise ArgumentError("folder", expected, f"{free} bytes at {self.path.parent}")

    def complete(self, name: str) -> None:
        """Hash the file at `part_path(name)`, sync it to disk, and give it its name."""
        part = self.part_path(name)
        with part.open("rb") as file:
            digest = hash_descriptor(file.fileno())
            os.fsync(file.fileno())
        part.rename(self.path / name)
        self.completed[name] = digest
        self._save_state()

    def synchronize(self) -> None:
        """Wait for all processes, and exchange `completed`."""
        for completed in self.workers.gather(self.completed):
            self.completed |= completed

    def part_path(self, name: str) -> Path:
        """Return the path of an incomplete file, and create its parent folder."""
        path = self.path / f"{name}.part"
        path.parent.mkdir(exist_ok=True)
        return path

    def write(self, name: str, content: bytes) -> None:
        """Write and complete a small file."""
        self.part_path(name).write_bytes(content)
        self.complete(name)

    def commit(self) -> None:
        """Rename the folder to `target`; the rename is atomic."""
        for name in (LOCK, STATE):
            for file in sorted(self.path.glob(f"{name}-*"), reverse=True):
                file.unlink()
        for folder in {(self.path / name).parent for name in self.completed} | {self.path}:
            _sync_folder(folder)
        if self.target.exists():
            self.target.rmdir()  # empty when the run began; `rmdir` refuses a folder with new files
        self.path.rename(self.target)
        _sync_folder(self.target.parent)

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path)

    def _resume(self) -> None:
        """Keep the files that any process of an earlier run completed, and remove all others."""
        for path in sorted(self.path.glob(f"{STATE}-*")):
            try:
                state = json.loads(path.read_bytes())
            except ValueError:
                state = None
            if not isinstance(state, dict) or state.get("job") != self.job:
                got = f"{self.path}, left by another conversion"
                raise ArgumentError("folder", "an unfinished folder of the same conversion, or none", got)
            self.completed |= state["done"]
        self._save_state()
        own_files = {self._own_file(STATE), self._own_file(LOCK)}
        for file in self.path.rglob("*"):
            name = file.relative_to(self.path).as_posix()
            if not file.is_dir() and name not in self.completed and file not in own_files:
                file.unlink()

    def _save_state(self) -> None:
        state = self._own_file(STATE)
        part = self.path / f"part-of-{state.name}"
        part.write_text(json.dumps({"job": self.job, "done": self.completed}))
        part.rename(state)


def check_output_folder(path: Path) -> None:
    """Raise ArgumentError if `path` exists and is not an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ArgumentError("folder", "an empty folder, or none", str(path))


def hash_descriptor(descriptor: int) -> str:
    """Return the SHA-256 of an open file, from its first byte."""
    digest, offset = sha256(), 0
    block = memoryview(bytearray(HASH_BLOCK_BYTES))  # reused, so that it stays in the processor's cache
    while count := os.preadv(descriptor, [block], offset):
        digest.update(block[:count])
        offset += count
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of the file at `path`."""
    with path.open("rb") as file:
        return hash_descriptor(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
