"""`quant_method: compressed-tensors`: groups of modules, each with a scheme and a format of its own.

Which group a module belongs to, its name says (`detect.matching`); of several entries that mean it, names
come before patterns and patterns before classes, and of one kind the first. `ignore` comes before all. A
module that no entry means is not quantized. Any module may be stored plain all the same: `Linear` as a target
does not say which modules are linear, the tensors do.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qload.detect.files import FoundConfig
from qload.detect.matching import CLASSES, Ignored, matcher, precedence
from qload.detect.methods import ct_activations, ct_schemes
from qload.detect.methods.ct_schemes import Scheme
from qload.detect.regex import Patterns
from qload.detect.rules import unsupported_loader
from qload.detect.validation import Claims, Section, validate
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats import UnquantizedConfig, UnquantizedWeight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.loader.exclusion import Exclusions
from qload.loader.modules import ModuleLoader
from qload.spec import ActivationScheme

KNOWN = (f"compressed-tensors ({', '.join(ct_schemes.FORMATS)})",)
PLAIN = ConfiguredFormat(UnquantizedWeight, UnquantizedConfig())
UNCOMPRESSED = ("initialized", "calibration", "frozen")  # statuses of models with plain weights
# Tensors beside a plain weight that compressed-tensors quantizes at run time.
OBSERVED = (
    "weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale",
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
)  # fmt: skip
OFFLINE = ("weight_input", "weight_output")  # locations of transforms applied to stored weights
KEYS = ("config_groups", "sparsity_config")  # which no other method has
DENSE_SINCE = (0, 18)  # the version that packs 3, 5, 6 and 7 bits as a stream

Entries = list[Annotated[str, Field(min_length=1)]]


class _Group(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    targets: Entries
    weights: Scheme | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class _CompressedTensors(Section):
    config_groups: dict[str, _Group] = Field(default_factory=dict)
    format: str | None = None
    ignore: Entries | None = None
    quantization_status: Literal["initialized", "calibration", "frozen", "compressed"] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    version: str | None = None


@dataclass(frozen=True)
class Untargeted(Exclusions):
    """All modules that no target means, which is as much as leaving them out."""

    def _entry(self, prefix: str) -> str:
        return prefix

    def reason(self, entry: str) -> str:
        """Which keys were looked at."""
        return f"no entry of {self.key} means it"

    def remedy(self, entry: str) -> str:
        """What to change."""
        return f"name the module in {self.key}, or store it plain"


def read(found: FoundConfig) -> Claims:
    """The claims of every group, and the loader that gives each module its own."""
    read = validate(_CompressedTensors, found)
    _refuse(read, found)
    formats: dict[str, ConfiguredFormat] = {}
    plain: dict[str, ConfiguredFormat] = {}
    refused: dict[str, UnsupportedFormatError] = {}
    for name, group in read.config_groups.items():
        try:
            fmt = _format_of(found, name, group, read)
        except UnsupportedFormatError as error:
            refused[name] = error
            continue
        if fmt:
            formats[name] = fmt
        else:
            plain[name] = replace(PLAIN, activations=_inputs_of(found, name, group, read))
    if refused and not formats:
        raise next(iter(refused.values()))
    quantized = [group for name, group in read.config_groups.items() if name in formats]
    packings = {group.format or read.format or "" for group in quantized}
    one = quantized[0].weights if len(set(formats.values())) == 1 else None
    return Claims(
        method="compressed-tensors",
        format=packings.pop() if len(packings) == 1 else "mixed-precision",
        bits=one.num_bits if one else None,
        group_size=one.rows_of_a_group if one else None,
        sym=one.symmetric if one else None,
        desc_act=None,
        file=found.file,
        section=found.section,
        formats=tuple(dict.fromkeys(formats.values())),
        loader=_loader(
            read, formats, plain, refused, Patterns(found, "ignore"), Patterns(found, "config_groups")
        ),
        notes=_notes(read, found),
    )


def _loader(
    read: _CompressedTensors,
    formats: Mapping[str, ConfiguredFormat],
    plain: Mapping[str, ConfiguredFormat],
    refused: Mapping[str, UnsupportedFormatError],
    ignoring: Patterns,
    targeting: Patterns,
) -> Callable[[], FormatLoader]:
    """Build a factory of loaders that check `ignore` first, then the targets in their order of precedence.

    `refused`: the error of each group with an unsupported format.
    """
    ignore = tuple(read.ignore or ())
    everything = (*dict.fromkeys(formats.values()), PLAIN)
    ignored = FormatLoader(*everything, exclusions=Ignored(ignore, patterns=ignoring))
    own = read.exclusions()
    targets = [(target, name) for name, group in read.config_groups.items() for target in group.targets]
    targets.sort(key=lambda pair: precedence(pair[0]))
    choices = [
        (matcher(target, patterns=targeting), unsupported_loader(refused[name]))
        if name in refused
        else _choice(target, formats.get(name) or plain[name], own, targeting, read)
        for target, name in targets
    ]
    keys = tuple(f"config_groups.{name}.targets" for name in read.config_groups)
    others = FormatLoader(*everything, exclusions=Untargeted(key=" or ".join(keys)))
    return lambda: ModuleLoader(
        [(matcher(*ignore, patterns=ignoring), ignored), *choices], others if formats else FormatLoader(PLAIN)
    )


def _choice(
    target: str, fmt: ConfiguredFormat, own: Exclusions, patterns: Patterns, read: _CompressedTensors
) -> tuple[Callable[[str], bool], FormatLoader]:
    """Build the loader of a target's modules."""
    plain = fmt.weight_type.plain
    loader = FormatLoader(fmt) if plain else FormatLoader(fmt, *_observed(read), PLAIN, exclusions=own)
    return matcher(target, patterns=patterns), loader


def _observed(read: _CompressedTensors) -> tuple[ConfiguredFormat, ...]:
    """Format of plain weights beside scales, in a model saved before compression."""
    if read.quantization_status not in UNCOMPRESSED:
        return ()
    why = (
        f"quantization_status is {read.quantization_status}: the stored weight is taken as it is, and is not "
        "quantized by the scales beside it, as the owner does while running"
    )
    config = UnquantizedConfig(unused=OBSERVED, unused_because=why)
    return (ConfiguredFormat(UnquantizedWeight, config),)


def _format_of(
    found: FoundConfig, name: str, group: _Group, read: _CompressedTensors
) -> ConfiguredFormat | None:
    """The format of a group's weights, or None where they are plain."""
    key = f"config_groups.{name}"
    for target in group.targets:
        if target[0].isupper() and target.isidentifier() and target not in CLASSES:
            raise UnsupportedFormatError(
                f"compressed-tensors for {target:.40}",
                f"a target of {found.key(key)} in {found.file}: no tensor tells of which class a module is",
                KNOWN,
            )
    stated = group.format or read.format
    if group.weights is None or stated == "dense":
        return None
    if stated is None:
        expected = "a format, there or for all groups"
        raise ConfigError(found.file, found.key(f"{key}.format"), expected, "nothing")
    version = re.match(r"(\d{1,9})\.(\d{1,9})", read.version or "")
    dense = (int(version[1]), int(version[2])) >= DENSE_SINCE if version else None
    inputs = _inputs_of(found, name, group, read)
    static = inputs is not None and not inputs.dynamic

    def place(setting: str) -> str:
        return f"{key}.weights.{setting}" if setting else f"{key}.format" if group.format else "format"

    read_as = ct_schemes.format_of(found, place, stated, group.weights, static=static, dense=dense)
    claims = group.weights.claims(f"config_groups.{name}")
    return replace(read_as, activations=inputs, claims=claims)


def _inputs_of(
    found: FoundConfig, name: str, group: _Group, read: _CompressedTensors
) -> ActivationScheme | None:
    """What a group declares of its inputs."""
    key, stated = f"config_groups.{name}.input_activations", group.format or read.format
    return ct_activations.scheme_of(found, key, group.input_activations, stated)


def _refuse(read: _CompressedTensors, found: FoundConfig) -> None:
    """What is known by name and not read, and a config that says nothing at all."""
    sparse = (read.sparsity_config or {}).get("format", "dense")
    if sparse != "dense":
        raise UnsupportedFormatError(
            f"compressed-tensors ({sparse!s:.40})",
            f"the format in sparsity_config of {found.file} has no reader",
            KNOWN,
        )
    if not read.config_groups and read.sparsity_config is None:
        raise ConfigError(found.file, found.key("config_groups"), "one or more groups", "none")
    if read.transform_config and any(read.transform_config.values()):
        online = sorted(_locations(read.transform_config) - set(OFFLINE))
        if online:
            raise UnsupportedFormatError(
                "compressed-tensors with transforms",
                f"the transform_config of {found.file} transforms inputs or outputs of layers at run time "
                f"({', '.join(online):.80}), and qload does not",
                KNOWN,
                "vLLM runs it",
            )


def _locations(transforms: Mapping[str, Any]) -> set[str]:
    """Collect the locations of transforms; "unknown" for an entry of another form."""
    groups = transforms.get("config_groups")
    if not isinstance(groups, dict) or len(transforms) > 1:
        return {"unknown"}
    applied = [group.get("apply") if isinstance(group, dict) else None for group in groups.values()]
    steps = [step for steps in applied for step in (steps if isinstance(steps, list) and steps else [None])]
    return {
        str(step["location"]) if isinstance(step, dict) and "location" in step else "unknown"
        for step in steps
    }


def _notes(read: _CompressedTensors, found: FoundConfig) -> tuple[str, ...]:
    """What the config says that no weight depends on."""
    notes = [
        f"{found.file} has output_activations in config_groups.{name:.80}, and outputs stay as they are"
        for name, group in read.config_groups.items()
        if group.output_activations
    ]
    if read.transform_config and any(read.transform_config.values()):
        notes.append(
            f"the transform_config of {found.file} transforms weights alone: stored weights are transformed "
            "already, and are read as stored"
        )
    if read.kv_cache_scheme:
        notes.append(
            f"{found.file} has a kv_cache_scheme, whose scales are no weights and are left to the engine"
        )
    return tuple(notes)
