"""Which modules an entry of a config means: by name, by regular expression, or by class.

    "lm_head"                     the module of this name, or whose name ends in these whole segments
    "re:.*\\.mlp\\.(gate|up)_proj"   what `re.match` matches: from the start of the name
    "Linear"                      every linear layer: a checkpoint has names, and no classes

Other methods' lists have dotted names, as `loader.exclusion` reads them, and patterns as in a shell:

    "model.layers.0*"             `*` is any letters, `?` one; what lies under such a module is meant too

Never a part of a segment: `layers.1` is not in `layers.10`. Patterns are matched in bounded time (`regex`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from qload.detect.files import FoundConfig
from qload.detect.regex import Regex
from qload.errors import ConfigError, PatternError
from qload.loader.exclusion import Exclusions

REGEX = "re:"
GLOB = {"*": ".*", "?": "."}  # the signs of a shell's patterns
SIGNS = frozenset("\\.()[]{}+|^$")  # which are letters of a shell's pattern
LINEAR = "Linear"  # the class that every typed weight is loaded for


def is_regex(entry: str) -> bool:
    """Whether an entry is a regular expression."""
    return entry.startswith(REGEX)


def is_glob(entry: str) -> bool:
    """Whether an entry is a pattern as in a shell."""
    return not GLOB.keys().isdisjoint(entry)


def matches(entry: str, name: str) -> bool:
    """Whether an entry means a module."""
    if is_regex(entry):
        return _regex(entry).match(name)
    return entry == LINEAR or name == entry or name.endswith(f".{entry}")


def matcher(*entries: str) -> Callable[[str], bool]:
    """Whether any of these entries means a module."""
    return lambda name: any(matches(entry, name) for entry in entries)


def check(
    found: FoundConfig, key: str, entries: Iterable[str], is_pattern: Callable[[str], bool] = is_regex
) -> None:
    """Every pattern among the entries can be read, or ConfigError."""
    for entry in entries:
        try:
            if is_pattern(entry):
                _regex(entry)
        except PatternError as error:
            raise ConfigError(
                found.file, found.key(key), "names, classes, and patterns that are read", str(error)
            ) from error


@cache
def _regex(entry: str) -> Regex:
    if is_regex(entry):
        return Regex(entry.removeprefix(REGEX))
    letters = (GLOB.get(letter) or (f"\\{letter}" if letter in SIGNS else letter) for letter in entry)
    return Regex("".join(letters) + r"(\..*)?$")


def precedence(entry: str) -> int:
    """Who has its say first where several entries mean a module: names, then patterns, then classes."""
    return 1 if entry.startswith(REGEX) else 2 if entry == LINEAR else 0


@dataclass(frozen=True)
class Ignored(Exclusions):
    """The modules that `ignore` leaves out, by entries of this kind."""

    key: str = "ignore"

    def _is_name(self, entry: str) -> bool:
        return not is_regex(entry)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {entry: at for at, entry in reversed([*enumerate(self.names)]) if self._is_name(entry)}

    def _first_name(self, prefix: str) -> int | None:
        """Of names that end a name at a dot, and of the class that every layer is of."""
        segments = prefix.split(".")
        ends = (".".join(segments[at:]) for at in range(len(segments)))
        return min((self._places[end] for end in (*ends, LINEAR) if end in self._places), default=None)

    def _knows(self, entry: str, prefix: str) -> bool:
        return matches(entry, prefix)


@dataclass(frozen=True)
class Globs(Exclusions):
    """The modules that are left out by whole names, or by patterns as in a shell."""

    def _is_name(self, entry: str) -> bool:
        return not is_glob(entry)

    def _knows(self, entry: str, prefix: str) -> bool:
        return _regex(entry).match(prefix)
