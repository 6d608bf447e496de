"""A quantization config of a file, its claims, and the `quant_method` that a format registers for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any

from qload.errors import ConfigError, UnsupportedFormatError
from qload.loader import ConfiguredFormat
from qload.loader.exclusion import Exclusions
from qload.loader.transforms import TransformRule
from qload.spec import LayerClaims, Weight
from qload.storage import WeightStorage

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 60, 60, 60


@dataclass(frozen=True)
class FoundConfig:
    """A quantization config: its file, its section in the file, its values, and the model's config.json."""

    file: str
    section: str  # "quantization_config", "text_config.quantization_config", or "" for the whole file
    values: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def key(self, name: str, *others: str) -> str:
        """Path of a key for messages: `bits` -> `quantization_config.bits`.

        Of several spellings, the path has the first one in the config.
        """
        stated = next((key for key in (name, *others) if self.values.get(key) is not None), name)
        return f"{self.section}.{stated}" if self.section else stated

    def error(self, key: str, expected: str, got: str, hint: str = "") -> ConfigError:
        """Create the error of a key, with the expected value, the value as text, and another line of text."""
        return ConfigError(self.file, self.key(key), expected, got, hint)


def value_text(value: Any) -> str:
    """Text of a value for an error: short for any length or depth."""
    return "nothing" if value is None else f"{_SHORT.repr(value):.60}"


NOTHING = Exclusions()
NEUTRAL_VALUES: tuple[Any, ...] = (None, False, "", "none", [], {})


def every_module(module: str) -> bool:
    """Select every module."""
    return True


@dataclass(frozen=True)
class ModuleRule:
    """Formats of the modules that an entry of a config selects.

    Attributes
    ----------
    formats
        Their formats, beside plain layers; empty if the modules are plain. Or the error of an unsupported
        format, raised for each quantized layer.
    selects
        Predicate on module names; it can be pickled, as engines need.
    exclusions
        Modules excluded from quantization.
    """

    formats: tuple[ConfiguredFormat, ...] | UnsupportedFormatError
    selects: Callable[[str], bool] = every_module
    exclusions: Exclusions = NOTHING


@dataclass(frozen=True)
class Claims:
    """Claims of a config about the layers it does not exclude; None for a missing claim.

    Attributes
    ----------
    method, format
        Quantization method, and its format or packing.
    bits, group_size, sym, desc_act
        Claims about all layers.
    file, section
        Place of the config, for messages.
    formats
        Formats of the layers, as arguments of the loader.
    exclusions
        Modules excluded from quantization.
    rules
        Formats by module, in order of precedence, for a config with settings of single modules; the last rule
        applies to all other modules. Empty: `formats` and `exclusions` apply to all modules.
    notes
        Remarks on keys that change no weight.
    unused
        Names of tensors without meaning for plain weights.
    transforms
        Rules of transforms that layers apply at run time.
    settings
        Last parts of the names of tensors with settings of the writer, which change no weight.
    """

    method: str
    format: str
    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None
    file: str = field(kw_only=True)
    section: str = ""
    formats: tuple[ConfiguredFormat, ...] = ()
    exclusions: Exclusions = NOTHING
    rules: tuple[ModuleRule, ...] = ()
    notes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    transforms: tuple[TransformRule, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def of_layers(self) -> LayerClaims:
        """Claims of the base config, for layers without their own entry."""
        return LayerClaims(self.bits, self.group_size, self.sym, self.desc_act)

    def facts(self) -> Mapping[str, Any]:
        """Claims as plain data, for a report."""
        names = ("method", "format", "bits", "group_size", "sym", "desc_act", "file", "section")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class IgnoredKey:
    """A config key that qload ignores or refuses.

    Attributes
    ----------
    meaning
        Effect of the key, as the predicate of a sentence about it.
    refused
        True for a key that changes the meaning of stored values.
    neutral
        Values without effect.
    """

    meaning: str
    refused: bool = False
    neutral: tuple[Any, ...] = NEUTRAL_VALUES


@dataclass(frozen=True)
class Method:
    """A `quant_method` of configs, with its reader.

    Attributes
    ----------
    names
        Values of `quant_method`.
    read
        Validate a config into claims: ConfigError for a malformed config, UnsupportedFormatError for an
        unsupported variant. Or the name of another method that reads the same config.
    formats
        Types of weights that a config of the method can describe.
    variants
        Supported variants, for messages.
    others
        Methods whose names `read` may return.
    activation_key
        Key that declares the quantization of inputs; "" without one.
    activation_formats
        Types of weights that the key applies to; None: `formats`.
    exclusion_key
        Way to exclude a module, for messages; a list in the config takes precedence.
    module_key
        Key with settings of single modules, which have the keys of the config itself; "" without one.
    ignored
        Keys that qload ignores or refuses although other programs act on them.
    complete
        Complete the claims by the stored tensors; UnsupportedFormatError for tensors that change layers.
    """

    names: tuple[str, ...]
    read: Callable[[FoundConfig], Claims | str]
    formats: tuple[type[Weight], ...]
    variants: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    activation_key: str = ""
    activation_formats: tuple[type[Weight], ...] | None = None
    exclusion_key: str = "modules_to_not_convert"
    module_key: str = ""
    ignored: Mapping[str, IgnoredKey] = field(default_factory=dict)
    complete: Callable[[Claims, FoundConfig, WeightStorage], Claims] | None = None

    @property
    def formats_with_activations(self) -> tuple[type[Weight], ...]:
        """Types of weights whose inputs a config of the method can declare as quantized."""
        if not self.activation_key:
            return ()
        return self.formats if self.activation_formats is None else self.activation_formats
