"""Text to ids and back, by the `tokenizer.json` of a checkpoint and the library tokenizers, if it is here."""

from collections.abc import Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from qload.errors import ArgumentError, ConfigError
from qload.storage import is_directory, is_taken, read_whole, snapshot

FILE = "tokenizer.json"
MAX_BYTES = 256 << 20  # of a vocabulary; the largest that are published take a tenth of that


class Tokenizer:
    """A checkpoint's own tokenizer.

    Parameters
    ----------
    path
        The checkpoint. ArgumentError where it has no `tokenizer.json`, and where the library is not
        installed; ConfigError where the file cannot be read as one.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        library = _library()
        place = Path(snapshot(path))
        file = (place if is_directory(place) else place.parent) / FILE
        if not is_taken(file, FILE):
            raise ArgumentError("prompt", f"a checkpoint with {FILE}, or --prompt-ids in its place", "none")
        text = read_whole(file, FILE, MAX_BYTES, "unreadable")
        try:
            self._held = library.Tokenizer.from_buffer(text)
        except Exception as error:  # the library raises no other
            raise ConfigError(FILE, "file", "a tokenizer", f"{error!s:.160}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with those that the tokenizer puts around it."""
        return [*self._held.encode(text).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without the special ones."""
        return str(self._held.decode([*ids]))


def _library() -> Any:
    try:
        return import_module("tokenizers")
    except ImportError as error:
        expected = "ids (--prompt-ids), or tokenizers installed: pip install 'qload-weights[text]'"
        raise ArgumentError("prompt", expected, f"a text ({error!s:.80})") from error
