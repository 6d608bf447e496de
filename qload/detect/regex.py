"""Regular expressions from a checkpoint, matched in time that their author does not choose.

A config is hostile input, and an engine that goes back takes years over `(a|a)*b$` and a name of fifty
letters. The library `regex` stops after a timeout. A pattern may take `OF_A_PATTERN` seconds more than its
matches are given, `PER_MATCH` each, and all patterns of a config `OF_A_CONFIG`: the number of names bounds it
all. What is out of time is not asked again: each layer that it may have meant is an error, and no other.

Tools match with Python's `re`, so what `re` does not read is not read here, nor what `regex` means otherwise.
Counts are limited because `regex` writes `{m,n}` out in memory.
"""

import gc
import re
from contextlib import suppress
from math import prod
from time import thread_time

import regex

from qload.detect.files import FoundConfig
from qload.errors import ConfigError, PatternError

LETTERS = 1 << 10  # of a pattern
GROUPS = 64  # of a pattern, and so the depth of the deepest
COUNT = 1 << 10  # of all {m,n} of a pattern, multiplied
PER_MATCH = 50e-6  # seconds: a match of a pattern as tools write them takes a tenth
OF_A_PATTERN, OF_A_CONFIG = 0.25, 2.0  # seconds

_COUNTS = re.compile(r"\{(\d*),?(\d*)\}")
_OTHERWISE = re.compile(r"\{[\d<=+,\s]*[deis]|\[\[:")  # fuzzy matches and POSIX classes, to `regex` alone


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
        self._left = OF_A_CONFIG
        self._left_of: dict[str, float] = {}

    def match(self, pattern: str, name: str) -> bool:
        """Whether a name begins with a match of a pattern; ConfigError where that cannot be told."""
        if pattern not in self._read and pattern not in self._given_up:
            try:
                self._read[pattern] = compiled(pattern)
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
            collections, began = _collections(), thread_time()
            try:
                matches = self._looked(pattern, name, began)
            except (MemoryError, RecursionError) as error:
                self._given_up[pattern] = type(error).__name__
                raise self._untold(pattern, name) from error
            collected = _collections() != collections
            if not collected:
                extra = thread_time() - began - PER_MATCH
                self._left_of[pattern] = min(OF_A_PATTERN, self._left_of.get(pattern, OF_A_PATTERN) - extra)
                self._left = min(OF_A_CONFIG, self._left - extra)
            if matches is not None:
                return matches
            if not collected:
                self._given_up[pattern] = "takes too long"
                raise self._untold(pattern, name)

    def _looked(self, pattern: str, name: str, began: float) -> bool | None:
        """Whether it matches; None where it took all the time that is left."""
        read = self._read[pattern]
        look = read.search if self._anywhere else read.match
        left = min(self._left_of.get(pattern, OF_A_PATTERN), self._left) + PER_MATCH
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


def _collections() -> int:
    """How often all garbage was collected."""
    count: int = gc.get_stats()[-1]["collections"]
    return count


def compiled(pattern: str) -> "regex.Pattern[str]":
    """A pattern that is read as Python's `re` reads it, or PatternError."""
    shown = f"{pattern:.40}"
    if len(pattern) > LETTERS:
        raise PatternError(shown, f"goes on to more than {LETTERS} letters")
    if pattern.count("(") > GROUPS:
        raise PatternError(shown, f"has more than {GROUPS} groups")
    if prod(max(1, int(most or least or 1)) for least, most in _COUNTS.findall(pattern)) > COUNT:
        raise PatternError(shown, f"repeats something more than {COUNT} times")
    other = _OTHERWISE.search(pattern)
    if other:
        raise PatternError(shown, f"cannot read {other[0]!r}")
    try:
        re.compile(pattern)
        return regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError, ValueError, Warning) as error:
        raise PatternError(shown, str(error)) from error
