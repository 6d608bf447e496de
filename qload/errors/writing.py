"""Which file could not be written, where the system does not say it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_to(place: Path) -> Iterator[None]:
    """Inside, an OSError names `place`, if it names no file: that of a write has none, as a full disk's."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(place)
        raise
