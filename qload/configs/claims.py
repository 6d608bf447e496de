"""Claims of a quantization config, and the `quant_method` that a format registers to read them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qload.configs.found_config import FoundConfig
from qload.errors import UnsupportedFormatError
from qload.loader import ConfiguredFormat
from qload.loader.exclusion import Exclusions
from qload.spec import LayerClaims, Weight

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

    @property
    def formats_with_activations(self) -> tuple[type[Weight], ...]:
        """Types of weights whose inputs a config of the method can declare as quantized."""
        if not self.activation_key:
            return ()
        return self.formats if self.activation_formats is None else self.activation_formats
