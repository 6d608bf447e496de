"""`ModuleLoader`, with a loader for each module of a config, and `UnreadLoader`, for unsupported formats."""

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
from qload.loader.exclusion import LEFT_OUT, check_agreed, parts, selects_module, stacks, wholes
from qload.loader.formats import FormatLoader
from qload.loader.source import TensorSource
from qload.spec import LayerClaims, named

Matcher = Callable[[str], bool]


class ModuleLoader(FormatLoader):
    """Loads a layer with the first loader whose matcher accepts its prefix, else with the default.

    Parts of a fused layer may have different loaders with equal results; else MismatchError with both parts.

    Parameters
    ----------
    choices
        (matcher, loader) in order; a matcher accepts or rejects a prefix.
    default
        Loader of all other prefixes.
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
        """Loader of the module `prefix`.

        An entry for a fused layer also holds for its parts, and an entry for a part for the fused layer; the
        earliest choice wins. Without an entry for a layer of one expert, the entry of its stacked matrix
        holds. MismatchError for parts with different entries.
        """
        place, own_parts = len(self.choices), parts(prefix)
        for name in (prefix, *wholes(prefix)):
            place = self._place(name, place)
        if place == len(self.choices):  # a config may list stacked matrices
            place = min((self._place(name, place) for name in stacks(prefix)), default=place)
        first = min((self._place(part, place) for part in own_parts), default=place)
        if first < place:
            claims = {part: self._claim(self._place(part, len(self.choices)), part) for part in own_parts}
            check_agreed(prefix, claims, "the config")
        return self._at(first)

    def names_alike(self, first: str, other: str) -> bool:
        """Return whether one loader reads the layers `first` and `other`, and treats them alike."""
        if type(self).describe is not ModuleLoader.describe or self._entries(first) != self._entries(other):
            return False
        if not self._transforms_alike(first, other):
            return False
        try:
            loaders = self.chosen(first), self.chosen(other)
        except (MismatchError, ConfigError):
            return False
        return loaders[0] is loaders[1] and loaders[0].names_alike(first, other)

    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """Describe the stored layer `prefix` of `weights` with its own loader.

        ConfigError for a pattern without a verdict on the layer.
        """
        try:
            loader = self.chosen(prefix)
        except (MismatchError, ConfigError) as error:
            with suppress(QloadError):
                layer = super().describe(weights, prefix)
                if layer.format.weight_type.plain:
                    return layer  # a plain layer has one meaning
            raise error from None
        layer = self._add_note(loader.describe(weights, prefix))
        return layer if self.transforms is None else self.transforms.add_to(layer)

    def for_rules(self) -> Self:
        """The same loader for rules, with the loaders of all modules."""
        twin = super().for_rules()
        twin.choices = tuple((accepts, loader.for_rules()) for accepts, loader in self.choices)
        twin.default = self.default.for_rules()
        return twin

    def claims_of(self, prefix: str) -> LayerClaims | None:
        """Claims about the layer `prefix`; None for an ambiguous config."""
        try:
            return self.chosen(prefix).claims_of(prefix)
        except (MismatchError, ConfigError):
            return None

    def left_out(self, prefix: str) -> str | None:
        """Reason for which the loader of the layer `prefix` excludes it."""
        return self.chosen(prefix).left_out(prefix)

    def _place(self, name: str, last: int) -> int:
        """Number of the first choice before `last` that selects a name, else `last`."""
        before = enumerate(self.choices[:last])
        return next((at for at, (accepts, _) in before if selects_module(accepts, name)), last)

    def _at(self, place: int) -> FormatLoader:
        return self.choices[place][1] if place < len(self.choices) else self.default

    def _claim(self, place: int, name: str) -> str:
        loader = self._at(place)
        inputs = ", ".join(f"{fmt.activations}" for fmt in loader.formats if fmt.activations)
        claim = f"as {loader}{', inputs ' * bool(inputs)}{inputs}"
        return claim if loader.exclusions.entry(name) is None else LEFT_OUT

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

    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """Describe a plain layer; MissingTensorError for a missing one; else UnsupportedFormatError."""
        try:
            return super().describe(weights, prefix)
        except (DtypeError, MissingTensorError, ShapeError, TwoFormatsError):
            if not any(weights.has_tensor(named(prefix, suffix)) for suffix in self.suffixes):
                raise
            raise self._named_error(prefix) from None

    def recognise_by(self, dialects: DialectRecogniser) -> None:
        """Do nothing: the config states the format of these layers."""

    def _named_error(self, prefix: str) -> UnsupportedFormatError:
        """Add the name of a layer to the error."""
        return replace(self.error, reason=f"{prefix}: {self.error.reason}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.error.format})"
