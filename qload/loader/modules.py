"""A loader that has another one for some modules: configs with several groups, or that leave modules out."""

from collections.abc import Callable, Sequence
from typing import Any, Self

from qload.errors import ArgumentError
from qload.loader.formats import FormatLoader
from qload.loader.source import TensorSource
from qload.loader.study import Studied

Matcher = Callable[[str], bool]


class ModuleLoader(FormatLoader):
    """Loads a layer as the first loader says whose matcher knows its prefix, and all others as the default.

    Parts of a fused layer may have different loaders as long as these make the same of them: otherwise the
    load is a MismatchError that names both parts.
    """

    def __init__(self, choices: Sequence[tuple[Matcher, FormatLoader]], default: FormatLoader) -> None:
        loaders = [*(loader for _, loader in choices), default]
        super().__init__(*dict.fromkeys(room for loader in loaders for room in loader.rooms))
        self.choices, self.default = tuple(choices), default

    def chosen(self, prefix: str) -> FormatLoader:
        """The loader of a module."""
        return next((loader for matches, loader in self.choices if matches(prefix)), self.default)

    def study(self, weights: TensorSource, prefix: str) -> Studied:
        """All that headers and facts tell about a layer, as its own loader reads it."""
        return self.chosen(prefix).study(weights, prefix)

    def with_config(self, **changes: Any) -> Self:
        """Refused: there is no one config."""
        raise ArgumentError("changes", "none: each module has its own config", ", ".join(changes))
