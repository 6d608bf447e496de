"""Copies of the project in which one fault at a time is applied, tested and reverted."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from qload.testing.selftest.runner import PytestRun, run_pytest
from tests.faults.fault import Fault
from tests.paths import ROOT

COPIED = ("qload", "tests", "fixtures", "golden", "docs", ".ci", "README.md", "pyproject.toml", "noxfile.py")
PYTEST_OPTIONS = ("-q", "-p", "no:cacheprovider", "--hypothesis-profile=faults", "-m", "not gpu")


class ProjectCopy:
    """A copy of the project in a `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.is_file():
                shutil.copyfile(source, folder / name)

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Apply a fault, and revert it at the end."""
        path = self.folder / fault.file
        text = path.read_text()
        fault.apply(self.folder)
        try:
            yield
        finally:
            path.write_text(text)

    def pytest(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> PytestRun:
        """Run the tests of the copy on its source."""
        options = (*PYTEST_OPTIONS, *arguments)
        return run_pytest(
            *options, path=[self.folder], folder=self.folder, environment=environment, timeout=timeout
        )


class CopyPool:
    """As many copies under a `folder` as threads use at once."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: SimpleQueue[ProjectCopy] = SimpleQueue()
        for number in range(count):
            self._free.put(ProjectCopy(folder / f"copy-{number}"))

    @contextmanager
    def take(self) -> Iterator[ProjectCopy]:
        """Lend a copy to one thread."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)
