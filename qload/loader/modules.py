"""A loader that has another one for some modules: configs with several groups, or that leave modules out."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

from qload.errors import (
    ArgumentError,
    ConfigError,
    DtypeError,
    MismatchError,
    MissingTensorError,
    QloadError,
    ShapeError,
    TwoFormatsError,
    UnsupportedFormatError,
    checked,
)
from qload.loader.description import ConfiguredFormat, DialectRecogniser, LayerDescription
from qload.loader.exclusion import LEFT_OUT, check_agreed, parts, stacks, wholes
from qload.loader.formats import FormatLoader
from qload.loader.source import TensorSource
from qload.spec import LayerClaims, named

Matcher = Callable[[str], bool]


class ModuleLoader(FormatLoader):
    """Loads a layer as the first loader says whose matcher knows its prefix, and all others as the default.

    Parts of a fused layer may have different loaders as long as these make the same of them: otherwise the
    load is a MismatchError that names both parts.

    Parameters
    ----------
    choices
        (matcher, loader) in order; a matcher says of a prefix whether it knows it.
    default
        The loader of all prefixes that none knows.
    """

    @checked
    def __init__(self, choices: Sequence[tuple[Matcher, FormatLoader]], default: FormatLoader) -> None:
        loaders = [*(loader for _, loader in choices), default]
        super().__init__(*dict.fromkeys(fmt for loader in loaders for fmt in loader.formats))
        self.config_tensors = tuple(dict.fromkeys(n for loader in loaders for n in loader.config_tensors))
        self.choices: tuple[tuple[Matcher, FormatLoader], ...] = tuple(choices)
        self.default: FormatLoader = default

    def recognise_by(self, dialects: DialectRecogniser) -> None:
        """Identify layers that fit no format of their loader by `dialects`."""
        super().recognise_by(dialects)
        for loader in (*(loader for _, loader in self.choices), self.default):
            loader.recognise_by(dialects)

    @checked
    def chosen(self, prefix: str) -> FormatLoader:
        """The loader of the module `prefix`.

        An entry for a fused layer also holds for its parts, and an entry for a part for the fused layer; the
        earliest choice wins. Without an entry for a layer of one expert, the entry of its stacked matrix
        holds. MismatchError for parts with different entries.
        """
        place, made_of = len(self.choices), parts(prefix)
        for name in (prefix, *wholes(prefix)):
            place = self._place(name, place)
        if place == len(self.choices):  # a config may list stacked matrices
            place = min((self._place(name, place) for name in stacks(prefix)), default=place)
        first = min((self._place(part, place) for part in made_of), default=place)
        if first < place:
            said = {part: self._said(self._place(part, len(self.choices)), part) for part in made_of}
            check_agreed(prefix, said, "the config")
        return self._at(first)

    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """All that headers and facts tell about a layer, as its own loader reads it.

        ConfigError where a pattern cannot be judged that may mean the layer.
        """
        try:
            loader = self.chosen(prefix)
        except (MismatchError, ConfigError) as error:
            with suppress(QloadError):
                layer = super().describe(weights, prefix)
                if layer.format.weight_type.plain:
                    return layer  # of what is not quantized nothing has two meanings
            raise error from None
        return self._noted(loader.describe(weights, prefix))

    def for_rules(self) -> Self:
        """The same loader for rules, with all its modules."""
        twin = super().for_rules()
        twin.choices = tuple((knows, loader.for_rules()) for knows, loader in self.choices)
        twin.default = self.default.for_rules()
        return twin

    def claims_of(self, prefix: str) -> LayerClaims | None:
        """Claims about the layer `prefix`; None for an ambiguous config."""
        try:
            return self.chosen(prefix).claims_of(prefix)
        except (MismatchError, ConfigError):
            return None

    def left_out(self, prefix: str) -> str | None:
        """Why the loader of the layer `prefix` leaves it out."""
        return self.chosen(prefix).left_out(prefix)

    def _place(self, name: str, last: int) -> int:
        """Of the first choice before `last` that knows a name, or `last`; those after it are not asked."""
        return next((at for at, (knows, _) in enumerate(self.choices[:last]) if knows(name)), last)

    def _at(self, place: int) -> FormatLoader:
        return self.choices[place][1] if place < len(self.choices) else self.default

    def _said(self, place: int, name: str) -> str:
        loader = self._at(place)
        inputs = ", ".join(f"{fmt.activations}" for fmt in loader.formats if fmt.activations)
        said = f"as {loader}{', inputs ' * bool(inputs)}{inputs}"
        return said if loader.exclusions.entry(name) is None else LEFT_OUT

    def with_config(self, **changes: Any) -> Self:
        """ArgumentError, whatever the changes are: there is no one config."""
        raise ArgumentError("changes", "none: each module has its own config", ", ".join(changes))


class UnreadLoader(FormatLoader):
    """Loads plain layers; any other layer raises UnsupportedFormatError with its name.

    Parameters
    ----------
    error
        The unsupported format of the config, the reason, and the remedy.
    plain
        Format of plain layers.
    suffixes
        Suffixes of quantized layers' tensors; a layer with none of them is missing.
    """

    def __init__(
        self, error: UnsupportedFormatError, plain: ConfiguredFormat, suffixes: Collection[str]
    ) -> None:
        super().__init__(plain)
        self.error = error
        self.suffixes = suffixes

    @checked
    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """Describe a plain layer; MissingTensorError for a missing one; else UnsupportedFormatError."""
        try:
            return super().describe(weights, prefix)
        except (DtypeError, MissingTensorError, ShapeError, TwoFormatsError):
            if not any(weights.has_tensor(named(prefix, suffix)) for suffix in self.suffixes):
                raise
            raise self._of(prefix) from None

    def recognise_by(self, dialects: DialectRecogniser) -> None:
        """Do nothing: the config states the format of these layers."""

    def _of(self, prefix: str) -> UnsupportedFormatError:
        """Add the name of a layer to the error."""
        return replace(self.error, reason=f"{prefix}: {self.error.reason}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.error.format})"
