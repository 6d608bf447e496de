"""Errors that one rank tells the others, as bytes: qload's own come through whole, of others the words."""

import io
import pickle
from typing import Any

from qload.errors import LostRankError, QloadError

MOST = 1 << 16  # bytes of an error; a longer one is told in words


def told(error: BaseException, rank: int, world: int) -> bytes:
    """An error of a rank as bytes, at most `MOST`."""
    if isinstance(error, QloadError):
        said = pickle.dumps(error)
        if len(said) <= MOST:
            return said
    words = f"it ended with {type(error).__name__}: {error}"
    return pickle.dumps(LostRankError(rank, world, words[: MOST // 8]))


def heard(said: bytes, rank: int, world: int) -> QloadError:
    """The error that another rank told; bytes that are none become a `LostRankError` of that rank."""
    try:
        error = _OwnErrors(io.BytesIO(said)).load()
    except Exception:  # whatever a pickle raises that is none of ours
        error = None
    if isinstance(error, QloadError):
        return error
    return LostRankError(rank, world, "what it said is no error of qload")


class _OwnErrors(pickle.Unpickler):
    """Makes errors of qload, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.startswith("qload.errors.") else None
        if not (isinstance(found, type) and issubclass(found, QloadError)):
            raise pickle.UnpicklingError(f"{module}.{name}: no error of qload")
        return found
