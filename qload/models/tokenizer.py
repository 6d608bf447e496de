"""Tokenizer of a checkpoint: `tokenizer.json`, read by the optional library tokenizers."""

from collections.abc import Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path

from qload.errors import ArgumentError, ConfigError
from qload.storage import is_directory, is_taken, read_whole, snapshot

FILE = "tokenizer.json"
MAX_FILE_BYTES = 256 << 20  # ten times the largest published vocabulary


class Tokenizer:
    """Tokenizer of a checkpoint.

    Parameters
    ----------
    path
        The checkpoint. ArgumentError if it has no `tokenizer.json`, or if the library tokenizers is not
        installed; ConfigError if the file is not a tokenizer.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        try:
            library = import_module("tokenizers")
        except ImportError as error:
            expected = "ids (--prompt-ids), or tokenizers installed: pip install 'qload-weights[text]'"
            raise ArgumentError("prompt", expected, f"a text ({error!s:.80})") from error
        place = Path(snapshot(path))
        file = (place if is_directory(place) else place.parent) / FILE
        if not is_taken(file, FILE):
            raise ArgumentError("prompt", f"a checkpoint with {FILE}, or --prompt-ids", "none")
        text = read_whole(file, FILE, MAX_FILE_BYTES, "unreadable")
        try:
            self._tokenizer = library.Tokenizer.from_buffer(text)
        except Exception as error:  # the only exception class of the library
            raise ConfigError(FILE, "file", "a tokenizer", f"{error!s:.160}") from error

    def encode(self, text: str) -> list[int]:
        """Encode a text to ids, with the tokenizer's special tokens."""
        return [*self._tokenizer.encode(text).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, without special tokens."""
        return str(self._tokenizer.decode([*ids]))
