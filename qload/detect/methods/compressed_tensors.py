"""`quant_method: compressed-tensors`: groups of modules, each with its own scheme and format.

The name of a module selects its group (`configs.matching`). Of several matching entries, names precede
patterns and patterns precede classes; of one kind the first counts. `ignore` precedes all. A module without
an entry is not quantized. Any module may still be stored plain: the target `Linear` does not tell linear
modules apart, their tensors do.

The formats of weights follow from a group's scheme and `format`. No weight depends on its
`input_activations`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

from pydantic import Field

from qload import configs
from qload.configs.matching import MODULE_CLASSES, precedence
from qload.detect.methods import ct_transforms
from qload.detect.methods.ct_schemes import CT_VARIANTS, Scheme, activation_scheme, weight_format
from qload.errors import UnsupportedFormatError
from qload.formats import (
    CTMXFP4Weight,
    CTNVFP4Weight,
    Fp8Weight,
    Marlin24Weight,
    MXFP8Weight,
    UnquantizedConfig,
    UnquantizedWeight,
)
from qload.formats.compressed_tensors.integers import CTIntWeight
from qload.formats.compressed_tensors.packed import CTPackWeight
from qload.formats.compressed_tensors.packed_tensor import CTPackTensorWeight
from qload.formats.unquantized import PLAIN
from qload.loader import ConfiguredFormat
from qload.loader.exclusion import Exclusions
from qload.spec import ActivationScheme

UNCOMPRESSED = ("initialized", "calibration", "frozen")  # statuses of models with plain weights
# Tensors stored with a plain weight that compressed-tensors quantizes at run time.
RUNTIME_SCALES = (
    "weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale",
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
)  # fmt: skip
CT_KEYS = ("config_groups", "sparsity_config")  # keys of no other method
MIN_BIT_STREAM_VERSION = (0, 18)  # first version that packs 3, 5, 6 and 7 bits as a stream


class _Group(configs.Entry):
    targets: configs.NameList
    weights: Scheme | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class _CompressedTensors(configs.Section):
    config_groups: dict[str, _Group] = Field(default_factory=dict)
    format: str | None = None
    ignore: configs.NameList | None = None
    quantization_status: Literal["initialized", "calibration", "frozen", "compressed"] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: ct_transforms.Transforms | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    version: str | None = None


@dataclass(frozen=True)
class Untargeted(Exclusions):
    """Exclusion of all modules without a target."""

    @property
    def is_empty(self) -> bool:
        """False: all modules are excluded."""
        return False

    def _entry(self, prefix: str) -> str:
        return prefix

    def reason(self, entry: str) -> str:
        """Reason for the exclusion, with the keys of the targets."""
        return f"no entry of {self.key} means it"

    def remedy(self, entry: str) -> str:
        """Change of the config, or of the checkpoint, as a remedy."""
        return f"name the module in {self.key}, or store it plain"


def read_compressed_tensors(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of all groups, and of the modules of each group."""
    section = configs.validate(_CompressedTensors, source)
    _refuse_unsupported(section, source)
    formats: dict[str, ConfiguredFormat | UnsupportedFormatError] = {}
    for name, group in section.config_groups.items():
        try:
            formats[name] = _group_format(source, name, group, section)
        except UnsupportedFormatError as error:
            formats[name] = error
    quantized = {name: fmt for name, fmt in formats.items() if _is_quantized(fmt)}
    refused = next((fmt for fmt in formats.values() if isinstance(fmt, UnsupportedFormatError)), None)
    if refused and not quantized:
        raise refused
    packings = {section.config_groups[name].format or section.format or "" for name in quantized}
    schemes = [section.config_groups[name].weights for name in quantized]
    scheme = schemes[0] if len(set(quantized.values())) == 1 else None
    return section.claims(
        source,
        "compressed-tensors",
        packings.pop() if len(packings) == 1 else "mixed-precision",
        *dict.fromkeys(quantized.values()),
        bits=scheme.num_bits if scheme else None,
        group_size=scheme.rows_of_a_group if scheme else None,
        sym=scheme.symmetric if scheme else None,
        exclusions=Exclusions(),
        rules=_rules(source, section, formats),
        notes=_notes(section, source),
        transforms=ct_transforms.read_rules(section.transform_config, source),
    )


def _is_quantized(fmt: ConfiguredFormat | UnsupportedFormatError) -> TypeGuard[ConfiguredFormat]:
    return isinstance(fmt, ConfiguredFormat) and not fmt.weight_type.plain


def _rules(
    source: configs.FoundConfig,
    section: _CompressedTensors,
    formats: Mapping[str, ConfiguredFormat | UnsupportedFormatError],
) -> tuple[configs.ModuleRule, ...]:
    """Rules of `ignore`, then of the targets in order of precedence, then of modules without a target.

    `formats`: group -> its format, or the error of an unsupported format.
    """
    quantized = tuple(dict.fromkeys(fmt for fmt in formats.values() if _is_quantized(fmt)))
    ignore, ignore_patterns = tuple(section.ignore or ()), configs.Patterns(source, "ignore")
    excluding = configs.IgnoredModules(ignore, patterns=ignore_patterns)
    rules = [configs.ModuleRule(quantized, configs.matcher(*ignore, patterns=ignore_patterns), excluding)]
    targets = [(target, name) for name, group in section.config_groups.items() for target in group.targets]
    patterns = configs.Patterns(source, "config_groups")
    for target, name in sorted(targets, key=lambda pair: precedence(pair[0])):
        fmt = formats[name]
        read: tuple[ConfiguredFormat, ...] | UnsupportedFormatError
        if isinstance(fmt, UnsupportedFormatError):
            read = fmt
        else:
            read = (fmt, *(_calibrated_format(section) if _is_quantized(fmt) else ()))
        rules.append(
            configs.ModuleRule(read, configs.matcher(target, patterns=patterns), section.exclusions())
        )
    keys = " or ".join(f"config_groups.{name}.targets" for name in section.config_groups)
    untargeted = Untargeted(key=keys) if quantized else Exclusions()
    return (*rules, configs.ModuleRule(quantized, exclusions=untargeted))


def _calibrated_format(section: _CompressedTensors) -> tuple[ConfiguredFormat, ...]:
    """Format of plain weights with scales, in a model saved before compression."""
    if section.quantization_status not in UNCOMPRESSED:
        return ()
    reason = (
        f"quantization_status is {section.quantization_status}: the stored weight is taken as it is; it is "
        "not quantized by the scales stored with it, as compressed-tensors does at run time"
    )
    config = UnquantizedConfig(unused=RUNTIME_SCALES, unused_because=reason)
    return (ConfiguredFormat(UnquantizedWeight, config),)


def _group_format(
    source: configs.FoundConfig, name: str, group: _Group, section: _CompressedTensors
) -> ConfiguredFormat:
    """Format of a group's weights, with its activation scheme."""
    key = f"config_groups.{name}"
    for target in group.targets:
        if target[0].isupper() and target.isidentifier() and target not in MODULE_CLASSES:
            raise UnsupportedFormatError(
                f"compressed-tensors for {target:.40}",
                f"a target of {source.key(key)} in {source.file}: tensors do not tell the class of a module",
                CT_VARIANTS,
            )
    stated = group.format or section.format
    if group.weights is None or stated == "dense":
        return replace(PLAIN, activations=_group_activations(source, name, group, section))
    if stated is None:
        raise source.error(f"{key}.format", "a format, there or for all groups", "nothing")
    version = re.match(r"(\d{1,9})\.(\d{1,9})", section.version or "")
    dense = (int(version[1]), int(version[2])) >= MIN_BIT_STREAM_VERSION if version else None
    inputs = _group_activations(source, name, group, section)
    static = inputs is not None and not inputs.dynamic

    def place(setting: str) -> str:
        return f"{key}.weights.{setting}" if setting else f"{key}.format" if group.format else "format"

    read_as = weight_format(source, place, stated, group.weights, static=static, dense=dense)
    claims = group.weights.claims(f"config_groups.{name}")
    return replace(read_as, activations=inputs, claims=claims)


def _group_activations(
    source: configs.FoundConfig, name: str, group: _Group, section: _CompressedTensors
) -> ActivationScheme | None:
    """Activation scheme declared by a group."""
    key, stated = f"config_groups.{name}.input_activations", group.format or section.format
    return activation_scheme(source, key, group.input_activations, stated)


def _refuse_unsupported(section: _CompressedTensors, source: configs.FoundConfig) -> None:
    """Raise UnsupportedFormatError for unsupported formats and transforms, ConfigError without groups."""
    sparse = (section.sparsity_config or {}).get("format", "dense")
    if sparse != "dense":
        raise UnsupportedFormatError(
            f"compressed-tensors ({sparse!s:.40})",
            f"the format in sparsity_config of {source.file} is not supported",
            CT_VARIANTS,
        )
    if not section.config_groups and section.sparsity_config is None:
        raise source.error("config_groups", "one or more groups", "none")
    ct_transforms.check_locations(section.transform_config, source)


def _notes(section: _CompressedTensors, source: configs.FoundConfig) -> tuple[str, ...]:
    """Notes on keys that change no weight."""
    notes = [
        f"{source.file} has output_activations in config_groups.{name:.80}, and outputs stay as they are"
        for name, group in section.config_groups.items()
        if group.output_activations
    ]
    notes += ct_transforms.describe(section.transform_config, source)
    if section.kv_cache_scheme:
        notes.append(
            f"{source.file} has a kv_cache_scheme, whose scales are no weights and are left to the engine"
        )
    return tuple(notes)


CT_WEIGHTS = (
    CTPackWeight,
    CTPackTensorWeight,
    CTIntWeight,
    Fp8Weight,
    Marlin24Weight,
    CTNVFP4Weight,
    CTMXFP4Weight,
    MXFP8Weight,
)
METHODS = (
    configs.Method(
        names=("compressed-tensors",),
        read=read_compressed_tensors,
        formats=CT_WEIGHTS,
        variants=CT_VARIANTS,
        activation_key="input_activations",
        activation_formats=(*CT_WEIGHTS, UnquantizedWeight),
        exclusion_key="ignore",
    ),
)
