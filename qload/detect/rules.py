"""Configs that say something else of some modules: entries that mean modules, and what holds for each."""

from collections.abc import Callable, Mapping

from qload.detect.matching import Ignored, matcher
from qload.detect.regex import Patterns
from qload.formats import UnquantizedConfig, UnquantizedWeight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.loader.exclusion import Exclusions
from qload.loader.modules import ModuleLoader

PLAIN = ConfiguredFormat(UnquantizedWeight, UnquantizedConfig())


def ruled(
    rules: Mapping[str, tuple[ConfiguredFormat, ...]],
    default: tuple[ConfiguredFormat, ...],
    exclusions: Exclusions,
    patterns: Patterns,
    key: str,
) -> Callable[[], FormatLoader]:
    """What makes a loader that asks one rule after another, and has the default's formats for all others.

    `rules`: entry -> the formats of the modules that it means, none where it leaves them out.
    """
    everything = dict.fromkeys([*default, *(fmt for formats in rules.values() for fmt in formats)])
    without = Ignored(tuple(entry for entry, formats in rules.items() if not formats), key, patterns=patterns)
    choices = [
        (
            matcher(entry, patterns=patterns),
            FormatLoader(*formats, PLAIN, exclusions=exclusions)
            if formats
            else FormatLoader(*everything, PLAIN, exclusions=without),
        )
        for entry, formats in rules.items()
    ]
    return lambda: ModuleLoader(choices, FormatLoader(*default, PLAIN, exclusions=exclusions))
