"""A quantization config found in a file, before its validation."""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

from qload.errors import ConfigError

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 60, 60, 60


@dataclass(frozen=True)
class FoundConfig:
    """A quantization config: its file, its section in the file, and its values."""

    file: str
    section: str  # "quantization_config", "text_config.quantization_config", or "" for the whole file
    values: Mapping[str, Any]

    def key(self, name: str, *others: str) -> str:
        """Path of a key for messages: `bits` -> `quantization_config.bits`.

        Of several spellings, the path has the first one in the config.
        """
        stated = next((key for key in (name, *others) if self.values.get(key) is not None), name)
        return f"{self.section}.{stated}" if self.section else stated

    def error(self, key: str, expected: str, got: str, hint: str = "") -> ConfigError:
        """Create the error of a key, with the expected value, the value as text, and another line of text."""
        return ConfigError(self.file, self.key(key), expected, got, hint)


def value_text(value: Any) -> str:
    """Text of a value for an error: short for any length or depth."""
    return "nothing" if value is None else f"{_SHORT.repr(value):.60}"
