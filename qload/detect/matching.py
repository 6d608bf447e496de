r"""Match a config's entries with modules: by name, by pattern or by class.

    "lm_head"                     the module with this name, or with these last segments
    "re:.*\\.mlp\\.(gate|up)_proj"   a match of `re.match`: from the start of the name
    "Linear"                      every linear layer: a checkpoint has names and no classes
    "Embedding"                   modules with the name of an embedding

Lists of other methods have dotted names (`loader.exclusion`) and shell patterns:

    "model.layers.0*"             `*` for any letters, `?` for one; includes all modules below a match

A match never ends inside a segment: `layers.1` is not in `layers.10`.

A config is hostile input: a backtracking engine takes years over `(a|a)*b$` and a name of fifty letters. The
library `regex` stops after a timeout. Each match is given `MATCH_SECONDS`; a pattern may exceed the sum of
these by `PATTERN_SECONDS`, and all patterns of a config by `CONFIG_SECONDS`. A pattern that runs out of time
is not tried again: each layer that it might select is an error, and no other layer is.

Tools match with Python's `re`. A pattern that `re` rejects, or that `regex` reads differently, is rejected.
Counts are limited because `regex` expands `{m,n}` in memory. `fnmatch` does not backtrack.
"""

import gc
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial
from math import prod
from time import thread_time

import regex

from qload.detect.files import FoundConfig
from qload.errors import ConfigError, PatternError, UnsupportedFormatError
from qload.formats import ROLES, UnquantizedConfig, UnquantizedWeight
from qload.loader import ConfiguredFormat, FormatLoader, UnreadLoader
from qload.loader.exclusion import Exclusions
from qload.loader.modules import ModuleLoader

MAX_PATTERN_LETTERS = 1 << 10  # of a pattern
MAX_GROUPS = 64  # of a pattern, and so the depth of the deepest
MAX_REPETITIONS = 1 << 10  # of all {m,n} of a pattern, multiplied
MATCH_SECONDS = 50e-6  # seconds: a match of a pattern as tools write them takes a tenth
PATTERN_SECONDS, CONFIG_SECONDS = 0.25, 2.0  # seconds

_REPETITIONS = re.compile(r"\{(\d*),?(\d*)\}")
_UNLIKE_RE = re.compile(r"\{[\d<=+,\s]*[deis]|\[\[:")  # fuzzy matches and POSIX classes, to `regex` alone


class Patterns:
    """The patterns of one key of a config; `found` None: of no file.

    `anywhere`: a match may begin at any letter of a name, as `re.search` has it; otherwise at the first, as
    `re.match` has it.
    """

    def __init__(
        self, found: FoundConfig | None = None, key: str = "pattern", *, anywhere: bool = False
    ) -> None:
        self._file = found.file if found else "config"
        self._key = found.key(key) if found else key
        self._anywhere = anywhere
        self._read: dict[str, regex.Pattern[str]] = {}
        self._given_up: dict[str, str] = {}  # pattern -> why it says nothing any more
        self._left = CONFIG_SECONDS
        self._left_of: dict[str, float] = {}

    def match(self, pattern: str, name: str) -> bool:
        """Whether a name begins with a match of a pattern; ConfigError where that cannot be told."""
        if pattern not in self._read and pattern not in self._given_up:
            try:
                self._read[pattern] = compile_pattern(pattern)
            except PatternError as error:
                self._given_up[pattern] = str(error)
        if pattern in self._given_up:
            raise self._untold(pattern, name)
        return self._timed(pattern, name)

    def _timed(self, pattern: str, name: str) -> bool:
        """A match, and what it took; of this thread's own time, as a machine may be busy with others.

        A collection of garbage takes this thread's time too, longer than all patterns may: then it is
        tried again, and nothing is counted.
        """
        while True:
            collections, began = _collection_count(), thread_time()
            try:
                matches = self._looked(pattern, name, began)
            except (MemoryError, RecursionError) as error:
                self._given_up[pattern] = type(error).__name__
                raise self._untold(pattern, name) from error
            collected = _collection_count() != collections
            if not collected:
                extra = thread_time() - began - MATCH_SECONDS
                self._left_of[pattern] = min(
                    PATTERN_SECONDS, self._left_of.get(pattern, PATTERN_SECONDS) - extra
                )
                self._left = min(CONFIG_SECONDS, self._left - extra)
            if matches is not None:
                return matches
            if not collected:
                self._given_up[pattern] = "takes too long"
                raise self._untold(pattern, name)

    def _looked(self, pattern: str, name: str, began: float) -> bool | None:
        """Whether it matches; None where it took all the time that is left."""
        read = self._read[pattern]
        look = read.search if self._anywhere else read.match
        left = min(self._left_of.get(pattern, PATTERN_SECONDS), self._left) + MATCH_SECONDS
        while (remains := began + left - thread_time()) > 0:
            with suppress(TimeoutError):
                return look(name, timeout=remains) is not None
        return None

    def _untold(self, pattern: str, name: str) -> ConfigError:
        return ConfigError(
            self._file,
            self._key,
            "patterns that can be read and matched in bounded time",
            f"{pattern[:60]!r}, which cannot be judged for {name}: {self._given_up[pattern]}",
        )


def _collection_count() -> int:
    """How often all garbage was collected."""
    count: int = gc.get_stats()[-1]["collections"]
    return count


def compile_pattern(pattern: str) -> "regex.Pattern[str]":
    """A pattern that is read as Python's `re` reads it, or PatternError."""
    shown = f"{pattern:.40}"
    if len(pattern) > MAX_PATTERN_LETTERS:
        raise PatternError(shown, f"goes on to more than {MAX_PATTERN_LETTERS} letters")
    if pattern.count("(") > MAX_GROUPS:
        raise PatternError(shown, f"has more than {MAX_GROUPS} groups")
    if (
        prod(max(1, int(most or least or 1)) for least, most in _REPETITIONS.findall(pattern))
        > MAX_REPETITIONS
    ):
        raise PatternError(shown, f"repeats something more than {MAX_REPETITIONS} times")
    other = _UNLIKE_RE.search(pattern)
    if other:
        raise PatternError(shown, f"cannot read {other[0]!r}")
    try:
        re.compile(pattern)
        return regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError, ValueError, Warning) as error:
        raise PatternError(shown, str(error)) from error


REGEX_PREFIX = "re:"
GLOB_CHARACTERS = frozenset("*?")  # the signs of a shell's patterns; brackets are letters
LINEAR_CLASS = "Linear"  # the class that every typed weight is loaded for
EMBEDDING_CLASS = "Embedding"  # the class of a vocabulary, which its name tells
EMBEDDINGS = frozenset(("embed_tokens", "embed_in", "wte", "word_embeddings", "tok_embeddings", "embeddings"))
MODULE_CLASSES = (LINEAR_CLASS, EMBEDDING_CLASS)


def is_regex(entry: str) -> bool:
    """Whether an entry is a regular expression."""
    return entry.startswith(REGEX_PREFIX)


def is_glob(entry: str) -> bool:
    """Whether an entry is a pattern as in a shell."""
    return not GLOB_CHARACTERS.isdisjoint(entry)


def matches(entry: str, name: str, patterns: Patterns) -> bool:
    """Whether an entry means a module; ConfigError where its pattern cannot be judged."""
    if is_regex(entry):
        return patterns.match(entry.removeprefix(REGEX_PREFIX), name)
    if entry == EMBEDDING_CLASS and name.rpartition(".")[2] in EMBEDDINGS:
        return True
    return entry == LINEAR_CLASS or name == entry or name.endswith(f".{entry}")


def matcher(*entries: str, patterns: Patterns) -> Callable[[str], bool]:
    """Whether any of these entries means a module; to be pickled, as engines do with what loads a model."""
    return partial(_any_matches, entries, patterns)


def _any_matches(entries: Iterable[str], patterns: Patterns, name: str) -> bool:
    return any(matches(entry, name, patterns) for entry in entries)


def check_pattern_lengths(
    found: FoundConfig, key: str, entries: Iterable[str], is_pattern: Callable[[str], bool] = is_glob
) -> None:
    """No pattern as in a shell among the entries is too long to be read, or ConfigError."""
    for entry in entries:
        if is_pattern(entry) and len(entry) > MAX_PATTERN_LETTERS:
            expected = f"names, and patterns of at most {MAX_PATTERN_LETTERS} letters"
            raise ConfigError(
                found.file, found.key(key), expected, f"{entry:.40}, more than {MAX_PATTERN_LETTERS}"
            )


def precedence(entry: str) -> int:
    """Who has its say first where several entries mean a module: names, then patterns, then classes."""
    return 1 if is_regex(entry) else {LINEAR_CLASS: 3, EMBEDDING_CLASS: 2}.get(entry, 0)


@dataclass(frozen=True)
class IgnoredModules(Exclusions):
    """The modules that `ignore` leaves out, by entries of this kind."""

    key: str = "ignore"
    patterns: Patterns = field(default_factory=Patterns, compare=False, repr=False)

    def _is_name(self, entry: str) -> bool:
        return not is_regex(entry)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {entry: at for at, entry in reversed([*enumerate(self.names)]) if self._is_name(entry)}

    def _first_name(self, prefix: str) -> int | None:
        """Of names that end a name at a dot, and of the class that every layer is of."""
        segments = prefix.split(".")
        ends = (".".join(segments[at:]) for at in range(len(segments)))
        return min((self._places[end] for end in (*ends, LINEAR_CLASS) if end in self._places), default=None)

    def _knows(self, entry: str, prefix: str) -> bool:
        return matches(entry, prefix, self.patterns)


@dataclass(frozen=True)
class GlobExclusions(Exclusions):
    """The modules that are left out by whole names, or by patterns as in a shell."""

    def _is_name(self, entry: str) -> bool:
        return not is_glob(entry)

    def _knows(self, entry: str, prefix: str) -> bool:
        shell = entry.replace("[", "[[]")
        return fnmatchcase(prefix, shell) or fnmatchcase(prefix, f"{shell}.*")


PLAIN = ConfiguredFormat(UnquantizedWeight, UnquantizedConfig())


def unsupported_loader(error: UnsupportedFormatError, plain: ConfiguredFormat = PLAIN) -> UnreadLoader:
    """Build the loader of an unsupported format: plain layers load, any other layer raises `error`."""
    return UnreadLoader(error, plain, tuple(ROLES))


def override_loader(
    rules: Mapping[str, tuple[ConfiguredFormat, ...] | UnsupportedFormatError],
    default: tuple[ConfiguredFormat, ...],
    exclusions: Exclusions,
    patterns: Patterns,
    key: str,
) -> Callable[[], FormatLoader]:
    """Build a factory of loaders with rules in order of precedence, and default formats for other modules.

    `rules`: entry -> the formats of its modules, empty if it excludes them, or the error of an unsupported
    format.
    """
    read = {entry: formats for entry, formats in rules.items() if isinstance(formats, tuple)}
    everything = dict.fromkeys([*default, *(fmt for formats in read.values() for fmt in formats)])
    left_out = tuple(entry for entry, formats in read.items() if not formats)
    without = IgnoredModules(left_out, key, patterns=patterns)

    def loader_of(formats: tuple[ConfiguredFormat, ...] | UnsupportedFormatError) -> FormatLoader:
        if isinstance(formats, UnsupportedFormatError):
            return unsupported_loader(formats)
        if formats:
            return FormatLoader(*formats, PLAIN, exclusions=exclusions)
        return FormatLoader(*everything, PLAIN, exclusions=without)

    choices = [(matcher(entry, patterns=patterns), loader_of(formats)) for entry, formats in rules.items()]
    return lambda: ModuleLoader(choices, FormatLoader(*default, PLAIN, exclusions=exclusions))
