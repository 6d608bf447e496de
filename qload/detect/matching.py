"""Which modules an entry of a config means: by name, by regular expression, or by class.

    "lm_head"                     the module of this name, or whose name ends in these whole segments
    "re:.*\\.mlp\\.(gate|up)_proj"   what `re.match` matches: from the start of the name
    "Linear"                      every linear layer: a checkpoint has names, and no classes

Never a part of a segment: `layers.1` is not in `layers.10`. Patterns are matched in bounded time (`regex`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from qload.detect.files import Found
from qload.detect.regex import Regex
from qload.errors import ConfigError, PatternError
from qload.loader.exclusion import Exclusions

REGEX = "re:"
LINEAR = "Linear"  # the class that every typed weight is loaded for


def matches(entry: str, name: str) -> bool:
    """Whether an entry means a module."""
    if entry.startswith(REGEX):
        return _regex(entry).match(name)
    return entry == LINEAR or name == entry or name.endswith(f".{entry}")


def matcher(*entries: str) -> Callable[[str], bool]:
    """Whether any of these entries means a module."""
    return lambda name: any(matches(entry, name) for entry in entries)


def check(found: Found, key: str, entries: Iterable[str]) -> None:
    """Every pattern among the entries can be read, or ConfigError."""
    for entry in entries:
        try:
            if entry.startswith(REGEX):
                _regex(entry)
        except PatternError as error:
            raise ConfigError(
                found.file, found.key(key), "names, classes, and patterns that are read", str(error)
            ) from error


@cache
def _regex(entry: str) -> Regex:
    return Regex(entry.removeprefix(REGEX))


def precedence(entry: str) -> int:
    """Who has its say first where several entries mean a module: names, then patterns, then classes."""
    return 1 if entry.startswith(REGEX) else 2 if entry == LINEAR else 0


@dataclass(frozen=True)
class Ignored(Exclusions):
    """The modules that `ignore` leaves out, by entries of this kind."""

    key: str = "ignore"

    def _entry(self, prefix: str) -> str | None:
        return next((entry for entry in self.names if matches(entry, prefix)), None)
