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

from qload.configs.claims import FoundConfig, ModuleRule
from qload.errors import ConfigError, PatternError, UnsupportedFormatError
from qload.loader import ConfiguredFormat
from qload.loader.exclusion import Exclusions

MAX_PATTERN_LETTERS = 1 << 10
MAX_GROUPS = 64  # groups of a pattern; bounds their depth
MAX_REPETITIONS = 1 << 10  # product of the counts of all {m,n} of a pattern
MATCH_SECONDS = 50e-6  # ten times the time of a match of a usual pattern
PATTERN_SECONDS, CONFIG_SECONDS = 0.25, 2.0

_REPETITIONS = re.compile(r"\{(\d*),?(\d*)\}")
_UNLIKE_RE = re.compile(r"\{[\d<=+,\s]*[deis]|\[\[:")  # fuzzy matches and POSIX classes, in `regex` alone


class Patterns:
    """Regular expressions of one key of a config, matched in bounded time.

    `source`: the config, for messages; None for patterns of no file. `anywhere`: search the whole name like
    `re.search`; otherwise match from its start like `re.match`.
    """

    def __init__(
        self, source: FoundConfig | None = None, key: str = "pattern", *, anywhere: bool = False
    ) -> None:
        self._file = source.file if source else "config"
        self.name = key
        self._key = source.key(key) if source else key
        self._anywhere = anywhere
        self._compiled: dict[str, regex.Pattern[str]] = {}
        self._failed: dict[str, str] = {}  # pattern -> reason
        self._left = CONFIG_SECONDS  # for all patterns; below, for each pattern
        self._pattern_left: dict[str, float] = {}

    def match(self, pattern: str, name: str) -> bool:
        """Return whether a pattern matches a name; ConfigError for an invalid or too slow pattern."""
        if pattern not in self._compiled and pattern not in self._failed:
            try:
                self._compiled[pattern] = compile_pattern(pattern)
            except PatternError as error:
                self._failed[pattern] = str(error)
        if pattern in self._failed:
            raise self._error(pattern, name)
        return self._timed_match(pattern, name)

    def _timed_match(self, pattern: str, name: str) -> bool:
        """Match, and subtract the CPU time of this thread from the time left.

        A garbage collection uses time of this thread, more than all patterns are allowed. After one the match
        is repeated and its time is not counted.
        """
        while True:
            collections, start = gc.get_stats()[-1]["collections"], thread_time()
            try:
                matches = self._match_before_timeout(pattern, name, start)
            except (MemoryError, RecursionError) as error:
                self._failed[pattern] = type(error).__name__
                raise self._error(pattern, name) from error
            collected = gc.get_stats()[-1]["collections"] != collections
            if not collected:
                extra = thread_time() - start - MATCH_SECONDS
                left = self._pattern_left.get(pattern, PATTERN_SECONDS) - extra
                self._pattern_left[pattern] = min(PATTERN_SECONDS, left)
                self._left = min(CONFIG_SECONDS, self._left - extra)
            if matches is not None:
                return matches
            if not collected:
                self._failed[pattern] = "takes too long"
                raise self._error(pattern, name)

    def _match_before_timeout(self, pattern: str, name: str, start: float) -> bool | None:
        """Return whether the pattern matches; None after all the time left."""
        compiled = self._compiled[pattern]
        match = compiled.search if self._anywhere else compiled.match
        left = min(self._pattern_left.get(pattern, PATTERN_SECONDS), self._left) + MATCH_SECONDS
        while (timeout := start + left - thread_time()) > 0:
            with suppress(TimeoutError):
                return match(name, timeout=timeout) is not None
        return None

    def _error(self, pattern: str, name: str) -> ConfigError:
        return ConfigError(
            self._file,
            self._key,
            "patterns that can be read and matched in bounded time",
            f"{pattern[:60]!r}, which cannot be judged for {name}: {self._failed[pattern]}",
        )


def compile_pattern(pattern: str) -> "regex.Pattern[str]":
    """Compile a pattern that `re` and `regex` read alike; PatternError for any other."""
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
GLOB_CHARACTERS = frozenset("*?")  # brackets are plain letters
LINEAR_CLASS = "Linear"  # the class of every typed weight
HEAD = "lm_head"
EMBEDDING_CLASS = "Embedding"  # told by the name of the module, see EMBEDDINGS
EMBEDDINGS = frozenset(("embed_tokens", "embed_in", "wte", "word_embeddings", "tok_embeddings", "embeddings"))
MODULE_CLASSES = (LINEAR_CLASS, EMBEDDING_CLASS)


def is_regex(entry: str) -> bool:
    """Return whether an entry is a regular expression."""
    return entry.startswith(REGEX_PREFIX)


def is_glob(entry: str) -> bool:
    """Return whether an entry is a shell pattern."""
    return not GLOB_CHARACTERS.isdisjoint(entry)


def matches(entry: str, name: str, patterns: Patterns) -> bool:
    """Return whether an entry selects a module; ConfigError for an invalid or too slow pattern."""
    if is_regex(entry):
        return patterns.match(entry.removeprefix(REGEX_PREFIX), name)
    if entry == EMBEDDING_CLASS and name.rpartition(".")[2] in EMBEDDINGS:
        return True
    return entry == LINEAR_CLASS or name == entry or name.endswith(f".{entry}")


def matcher(*entries: str, patterns: Patterns) -> Callable[[str], bool]:
    """Build the predicate "any of these entries selects the module"; it can be pickled, as engines need."""
    return partial(_any_matches, entries, patterns)


def _any_matches(entries: Iterable[str], patterns: Patterns, name: str) -> bool:
    return any(matches(entry, name, patterns) for entry in entries)


def check_pattern_lengths(source: FoundConfig, key: str, entries: Iterable[str]) -> None:
    """Raise ConfigError if a shell pattern among the entries is too long."""
    for entry in entries:
        if is_glob(entry) and len(entry) > MAX_PATTERN_LETTERS:
            expected = f"names, and patterns of at most {MAX_PATTERN_LETTERS} letters"
            raise ConfigError(
                source.file, source.key(key), expected, f"{entry:.40}, more than {MAX_PATTERN_LETTERS}"
            )


def precedence(entry: str) -> int:
    """Rank of an entry among several matching ones: names, then patterns, then classes."""
    return 1 if is_regex(entry) else {LINEAR_CLASS: 3, EMBEDDING_CLASS: 2}.get(entry, 0)


@dataclass(frozen=True)
class IgnoredModules(Exclusions):
    """Modules excluded by `ignore`: names, regular expressions and classes."""

    key: str = "ignore"
    patterns: Patterns = field(default_factory=Patterns, compare=False, repr=False)

    def _is_name(self, entry: str) -> bool:
        return not is_regex(entry)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {entry: at for at, entry in reversed([*enumerate(self.names)]) if self._is_name(entry)}

    def _first_name(self, prefix: str) -> int | None:
        """Position of the first entry with the last segments of a name, or with the class `Linear`."""
        segments = prefix.split(".")
        ends = (".".join(segments[at:]) for at in range(len(segments)))
        return min((self._places[end] for end in (*ends, LINEAR_CLASS) if end in self._places), default=None)

    def _knows(self, entry: str, prefix: str) -> bool:
        return matches(entry, prefix, self.patterns)


@dataclass(frozen=True)
class GlobExclusions(Exclusions):
    """Modules excluded by whole names or shell patterns."""

    def _is_name(self, entry: str) -> bool:
        return not is_glob(entry)

    def _knows(self, entry: str, prefix: str) -> bool:
        shell = entry.replace("[", "[[]")
        return fnmatchcase(prefix, shell) or fnmatchcase(prefix, f"{shell}.*")


def override_rules(
    rules: Mapping[str, tuple[ConfiguredFormat, ...] | UnsupportedFormatError],
    default: tuple[ConfiguredFormat, ...],
    exclusions: Exclusions,
    patterns: Patterns,
) -> tuple[ModuleRule, ...]:
    """Rules of a config whose entries override the formats of all modules; none without entries.

    `rules`: entry -> the formats of its modules, empty for excluded modules, or the error of an unsupported
    format; in order of precedence. `default`: formats of other modules. `patterns`: those of the entries.
    """
    if not rules:
        return ()
    supported = {entry: formats for entry, formats in rules.items() if isinstance(formats, tuple)}
    all_formats = dict.fromkeys([*default, *(fmt for formats in supported.values() for fmt in formats)])
    excluded = tuple(entry for entry, formats in supported.items() if not formats)
    excluding = IgnoredModules(excluded, patterns.name, patterns=patterns)
    return (
        *(
            ModuleRule(formats, matcher(entry, patterns=patterns), exclusions)
            if formats
            else ModuleRule(tuple(all_formats), matcher(entry, patterns=patterns), excluding)
            for entry, formats in rules.items()
        ),
        ModuleRule(default, exclusions=exclusions),
    )
