"""Interrupted runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from qload.conversion.atomic_folder import AtomicFolder


@contextmanager
def interrupted(after: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupt a run after this number of complete files, within the context."""
    complete = AtomicFolder.complete

    def completing(folder: AtomicFolder, name: str) -> None:
        if len(folder.completed) == after:
            raise KeyboardInterrupt
        complete(folder, name)

    with monkeypatch.context() as patched:
        patched.setattr(AtomicFolder, "complete", completing)
        with pytest.raises(KeyboardInterrupt):
            yield
