"""Configs that say something else of some modules: entries that mean modules, and what holds for each."""

from collections.abc import Callable, Mapping

from qload.detect.matching import Ignored, matcher
from qload.detect.regex import Patterns
from qload.errors import UnsupportedFormatError
from qload.formats import ROLES, UnquantizedConfig, UnquantizedWeight
from qload.loader import ConfiguredFormat, FormatLoader, UnreadLoader
from qload.loader.exclusion import Exclusions
from qload.loader.modules import ModuleLoader

PLAIN = ConfiguredFormat(UnquantizedWeight, UnquantizedConfig())


def unsupported_loader(error: UnsupportedFormatError, plain: ConfiguredFormat = PLAIN) -> UnreadLoader:
    """Build the loader of an unsupported format: plain layers load, any other layer raises `error`."""
    return UnreadLoader(error, plain, tuple(ROLES))


def ruled(
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
    without = Ignored(left_out, key, patterns=patterns)

    def loader_of(formats: tuple[ConfiguredFormat, ...] | UnsupportedFormatError) -> FormatLoader:
        if isinstance(formats, UnsupportedFormatError):
            return unsupported_loader(formats)
        if formats:
            return FormatLoader(*formats, PLAIN, exclusions=exclusions)
        return FormatLoader(*everything, PLAIN, exclusions=without)

    choices = [(matcher(entry, patterns=patterns), loader_of(formats)) for entry, formats in rules.items()]
    return lambda: ModuleLoader(choices, FormatLoader(*default, PLAIN, exclusions=exclusions))
