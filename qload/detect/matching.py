"""Which modules an entry of a config means: by name, by regular expression, or by class.

    "lm_head"                     the module of this name, or whose name ends in these whole segments
    "re:.*\\.mlp\\.(gate|up)_proj"   what `re.match` matches: from the start of the name
    "Linear"                      every linear layer: a checkpoint has names, and no classes
    "Embedding"                   modules that are named as embeddings are

Other methods' lists have dotted names, as `loader.exclusion` reads them, and patterns as in a shell:

    "model.layers.0*"             `*` is any letters, `?` one; what lies under such a module is meant too

Never a part of a segment: `layers.1` is not in `layers.10`. Patterns are matched in bounded time (`regex`;
`fnmatch` never goes back).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial

from qload.detect.files import FoundConfig
from qload.detect.regex import LETTERS, Patterns
from qload.errors import ConfigError
from qload.loader.exclusion import Exclusions

REGEX = "re:"
GLOB = frozenset("*?")  # the signs of a shell's patterns; brackets are letters
LINEAR = "Linear"  # the class that every typed weight is loaded for
EMBEDDING = "Embedding"  # the class of a vocabulary, which its name tells
EMBEDDINGS = frozenset(("embed_tokens", "embed_in", "wte", "word_embeddings", "tok_embeddings", "embeddings"))
CLASSES = (LINEAR, EMBEDDING)


def is_regex(entry: str) -> bool:
    """Whether an entry is a regular expression."""
    return entry.startswith(REGEX)


def is_glob(entry: str) -> bool:
    """Whether an entry is a pattern as in a shell."""
    return not GLOB.isdisjoint(entry)


def matches(entry: str, name: str, patterns: Patterns) -> bool:
    """Whether an entry means a module; ConfigError where its pattern cannot be judged."""
    if is_regex(entry):
        return patterns.match(entry.removeprefix(REGEX), name)
    if entry == EMBEDDING and name.rpartition(".")[2] in EMBEDDINGS:
        return True
    return entry == LINEAR or name == entry or name.endswith(f".{entry}")


def matcher(*entries: str, patterns: Patterns) -> Callable[[str], bool]:
    """Whether any of these entries means a module; to be pickled, as engines do with what loads a model."""
    return partial(_any_matches, entries, patterns)


def _any_matches(entries: Iterable[str], patterns: Patterns, name: str) -> bool:
    return any(matches(entry, name, patterns) for entry in entries)


def check(
    found: FoundConfig, key: str, entries: Iterable[str], is_pattern: Callable[[str], bool] = is_glob
) -> None:
    """No pattern as in a shell among the entries is too long to be read, or ConfigError."""
    for entry in entries:
        if is_pattern(entry) and len(entry) > LETTERS:
            expected = f"names, and patterns of at most {LETTERS} letters"
            raise ConfigError(found.file, found.key(key), expected, f"{entry:.40}, more than {LETTERS}")


def precedence(entry: str) -> int:
    """Who has its say first where several entries mean a module: names, then patterns, then classes."""
    return 1 if is_regex(entry) else {LINEAR: 3, EMBEDDING: 2}.get(entry, 0)


@dataclass(frozen=True)
class Ignored(Exclusions):
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
        return min((self._places[end] for end in (*ends, LINEAR) if end in self._places), default=None)

    def _knows(self, entry: str, prefix: str) -> bool:
        return matches(entry, prefix, self.patterns)


@dataclass(frozen=True)
class Globs(Exclusions):
    """The modules that are left out by whole names, or by patterns as in a shell."""

    def _is_name(self, entry: str) -> bool:
        return not is_glob(entry)

    def _knows(self, entry: str, prefix: str) -> bool:
        shell = entry.replace("[", "[[]")
        return fnmatchcase(prefix, shell) or fnmatchcase(prefix, f"{shell}.*")
