"""Runs that end in the middle."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from qload.conversion.atomic_folder import UnfinishedFolder


@contextmanager
def interrupted(after: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it a run ends once so many files are complete."""
    complete = UnfinishedFolder.complete

    def completing(folder: UnfinishedFolder, name: str) -> None:
        if len(folder.done) == after:
            raise KeyboardInterrupt
        complete(folder, name)

    with monkeypatch.context() as patched:
        patched.setattr(UnfinishedFolder, "complete", completing)
        with pytest.raises(KeyboardInterrupt):
            yield
