"""Copies of the project in which one fault at a time is applied, tested and reverted."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

from qload.testing.selftest.runner import PytestRun, run_pytest
from tests.faults.fault import Fault
from tests.paths import ROOT

COPIED = (  # patterns of the top level: without `.git`, builds and environments
    *("qload", "csrc", "tests", "fixtures", "golden", "docs", ".ci", ".github", ".pre-commit*.yaml"),
    *("*.md", "*.py", "*.toml", "*.yml", "*.cff", "LICENSE"),
)
PYTEST_OPTIONS = ("-q", "-p", "no:cacheprovider", "--hypothesis-profile=faults", "-m", "not gpu")
Item = TypeVar("Item")


class ProjectCopy:
    """A copy of the project in a `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, folder: Path) -> Self:
        """Copy the sources of the project to a new folder."""
        folder.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__", "venv")
        for source in chain.from_iterable(map(ROOT.glob, COPIED)):
            if source.is_dir():
                shutil.copytree(source, folder / source.name, ignore=ignored)
            else:
                shutil.copyfile(source, folder / source.name)
        return cls(folder)

    def clone(self, folder: Path) -> Self:
        """Copy the copy to a new folder, with its compiled modules."""
        return type(self)(Path(shutil.copytree(self.folder, folder)))

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


class Pool(Generic[Item]):
    """As many `items`, such as copies, as threads use at once."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._free: SimpleQueue[Item] = SimpleQueue()
        for item in items:
            self._free.put(item)

    @contextmanager
    def take(self) -> Iterator[Item]:
        """Lend an item to one thread."""
        item = self._free.get()
        try:
            yield item
        finally:
            self._free.put(item)
