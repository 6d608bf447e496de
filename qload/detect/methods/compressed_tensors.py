"""`quant_method: compressed-tensors`: groups of modules, each with its own scheme and format.

The name of a module selects its group (`detect.matching`). Of several matching entries, names precede
patterns and patterns precede classes; of one kind the first counts. `ignore` precedes all. A module without
an entry is not quantized. Any module may still be stored plain: the target `Linear` does not tell linear
modules apart, their tensors do.

The formats of weights follow from a group's scheme and `format`. No weight depends on its
`input_activations`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from qload.detect.files import FoundConfig, shown
from qload.detect.matching import (
    MODULE_CLASSES,
    PLAIN,
    IgnoredModules,
    Patterns,
    matcher,
    precedence,
    unsupported_loader,
)
from qload.detect.validation import Claims, Section, validate
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats import (
    CTIntConfig,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackConfig,
    CTPackTensorConfig,
    CTPackTensorWeight,
    CTPackWeight,
    Fp8Config,
    Fp8Weight,
    Marlin24Config,
    Marlin24Weight,
    MXFP4Config,
    MXFP8Config,
    MXFP8Weight,
    NVFP4Config,
    UnquantizedConfig,
    UnquantizedWeight,
)
from qload.loader import ConfiguredFormat, FormatLoader
from qload.loader.exclusion import Exclusions
from qload.loader.modules import ModuleLoader
from qload.spec import ActivationScheme, LayerClaims

# Where the scale of a tensor is stored that scales of groups come on top of, and where all others are.
STORED_SCALES: Mapping[bool | str, str | None] = {
    "local": "input_global_scale",
    False: "input_scale",
    True: None,
}
ZERO_POINT = "input_zero_point"
ScaleType = Literal["float32", "e4m3", "e8m0"]
SCALE_TYPES: Mapping[str | None, ScaleType] = {
    "torch.float8_e4m3fn": "e4m3",
    "torch.uint8": "e8m0",
}
MX_GROUP_SIZE = 32  # inputs that share a power of two
GROUPED_STRATEGIES = ("group", "tensor_group")


class _Activations(BaseModel):
    """The tool's defaults are those of its own class."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="allow")

    num_bits: Annotated[int, Field(ge=1, le=64)] = 8
    type: Literal["int", "float"] = "int"
    dynamic: bool | Literal["local"] | None = False
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: str | None = None

    @property
    def shared_by(self) -> str:
        """Which inputs share a scale; where the config does not say, what the tool infers."""
        inferred = "tensor" if self.group_size is None else "group" if self.group_size > 0 else "channel"
        return self.strategy or inferred


def activation_scheme(
    found: FoundConfig, key: str, stated: Mapping[str, Any] | None, weights: str | None = None
) -> ActivationScheme | None:
    """The scheme under a key of the config; None where there is none, ConfigError where it is malformed.

    `weights`: the format of the group's weights. Versions that say no type of scales have one for it.
    """
    if not stated:
        return None
    section = FoundConfig(found.file, found.key(key), stated)
    inputs = validate(_Activations, section)
    dynamic, grouped = inputs.dynamic or False, inputs.shared_by in GROUPED_STRATEGIES
    if grouped and (inputs.group_size or 0) < 1:
        raise ConfigError(found.file, found.key(f"{key}.group_size"), "at least 1", shown(inputs.group_size))
    scale_type: ScaleType = SCALE_TYPES.get(inputs.scale_dtype, "float32")
    if inputs.scale_dtype is None and dynamic == "local":
        scale_type = "e4m3"
    elif (
        inputs.scale_dtype is None
        and inputs.group_size == MX_GROUP_SIZE
        and (weights or "").startswith("mxfp")
    ):
        scale_type = "e8m0"
    return ActivationScheme(
        type=inputs.type,
        bits=inputs.num_bits,
        dynamic=dynamic,
        strategy=inputs.shared_by,
        group_size=inputs.group_size,
        symmetric=inputs.symmetric,
        scale=STORED_SCALES[dynamic],
        zero_point=None if dynamic or inputs.symmetric else ZERO_POINT,
        scale_type=scale_type if dynamic else "float32",
    )


# What each format stores: the type, the bits, and how weights may share a scale.
Strategy = Literal["tensor", "channel", "group", "block", "tensor_group"]
ALL_STRATEGIES = ("tensor", "channel", "group", "block")
CT_FORMATS: dict[str, tuple[tuple[str, ...], range, tuple[str, ...]]] = {
    "pack-quantized": (("int",), range(2, 9), ("tensor", "channel", "group")),
    "int-quantized": (("int",), range(2, 9), ALL_STRATEGIES),
    "float-quantized": (("float",), range(8, 9), ALL_STRATEGIES),
    "naive-quantized": (("int", "float"), range(2, 9), ALL_STRATEGIES),
    "marlin-24": (("int",), range(4, 9, 4), ("channel", "group")),
    "nvfp4-pack-quantized": (("float",), range(4, 5), ("tensor_group",)),
    "mxfp4-pack-quantized": (("float",), range(4, 5), ("group",)),
    "mxfp8-quantized": (("float",), range(8, 9), ("group",)),
}


class Scheme(BaseModel):
    """How the weights of a group are quantized."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="allow")

    num_bits: int
    type: Literal["int", "float"] = "int"
    strategy: Strategy | None = None
    group_size: Annotated[int, Field(ge=-1)] | None = None
    block_structure: list[Annotated[int, Field(ge=1)]] | str | None = None
    symmetric: bool = True
    actorder: Literal["group", "weight", "dynamic", "static"] | bool | None = None

    def claims(self, source: str) -> LayerClaims:
        """Claims about each layer of the scheme; `source`: the path of the scheme in the config."""
        act_order = (
            self.actorder in ("group", "dynamic", True) if "actorder" in self.model_fields_set else None
        )
        return LayerClaims(self.num_bits, self.rows_of_a_group, self.symmetric, act_order, source)

    @property
    def per(self) -> str:
        """What shares a scale; where it is not said, the group size tells."""
        default = "tensor" if self.group_size is None else "group" if self.group_size > 0 else "channel"
        return self.strategy or default

    @property
    def rows_of_a_group(self) -> int | None:
        """Inputs that share a scale; -1: all of them."""
        return (
            self.group_size
            if self.per in ("group", "tensor_group")
            else -1
            if self.per == "channel"
            else None
        )


def weight_format(
    found: FoundConfig,
    key: Callable[[str], str],
    stated: str,
    scheme: Scheme,
    *,
    static: bool,
    dense: bool | None,
) -> ConfiguredFormat:
    """The format that reads a scheme.

    `key`: the place in the config of a setting by its name, and of the format by "".
    `static`: activations have stored scales. `dense`: what the version says.
    """
    if stated not in CT_FORMATS:
        raise UnsupportedFormatError(
            f"compressed-tensors ({stated:.40})",
            f"{found.key(key(''))} of {found.file} has no reader",
            (*CT_FORMATS,),
        )
    block, size = _checked_block(found, key, stated, scheme), scheme.rows_of_a_group or -1
    symmetric, bits = scheme.symmetric, scheme.num_bits
    if stated == "nvfp4-pack-quantized":
        return ConfiguredFormat(CTNVFP4Weight, NVFP4Config())
    if stated == "mxfp4-pack-quantized":
        return ConfiguredFormat(CTMXFP4Weight, MXFP4Config())
    if stated == "mxfp8-quantized":
        return ConfiguredFormat(MXFP8Weight, MXFP8Config())
    if stated == "marlin-24":
        return ConfiguredFormat(Marlin24Weight, Marlin24Config(size, bits, compressed=True))
    if stated == "pack-quantized" and scheme.per == "tensor":
        return ConfiguredFormat(CTPackTensorWeight, CTPackTensorConfig(bits, symmetric, dense))
    if stated == "pack-quantized":
        act_order = scheme.actorder in ("group", "dynamic", True)
        return ConfiguredFormat(CTPackWeight, CTPackConfig(bits, size, symmetric, act_order, dense))
    if scheme.type == "int":
        return ConfiguredFormat(CTIntWeight, CTIntConfig(block, bits, symmetric, static))
    inputs = True if static else None
    if scheme.per in ("tensor", "channel"):
        return ConfiguredFormat(
            Fp8Weight, Fp8Config("tensor" if scheme.per == "tensor" else "channel", input_scale=inputs)
        )
    return ConfiguredFormat(Fp8Weight, Fp8Config("block", block, input_scale=inputs))


def _checked_block(
    found: FoundConfig, key: Callable[[str], str], stated: str, scheme: Scheme
) -> tuple[int, int] | None:
    """What shares a scale, as (outputs, inputs); ConfigError for what the format does not store."""
    types, bits, strategies = CT_FORMATS[stated]
    bits = range(8, 9) if scheme.type == "float" and stated == "naive-quantized" else bits

    def wrong(name: str, expected: str, got: Any) -> ConfigError:
        return ConfigError(found.file, found.key(key(name)), f"{expected} in {stated}", shown(got))

    if scheme.type not in types:
        raise wrong("type", " or ".join(types), scheme.type)
    if scheme.num_bits not in bits:
        raise wrong("num_bits", " or ".join(map(str, bits)), scheme.num_bits)
    if scheme.per not in strategies:
        raise wrong("strategy", " or ".join(strategies), scheme.per)
    if not scheme.symmetric and (scheme.type == "float" or stated == "marlin-24"):
        raise wrong("symmetric", "true", False)
    if scheme.per in ("group", "tensor_group"):
        sizes = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32, "mxfp8-quantized": 32}
        if (scheme.group_size or 0) < 1 or sizes.get(stated, scheme.group_size) != scheme.group_size:
            raise wrong("group_size", str(sizes.get(stated, "at least 1")), scheme.group_size)
        return 1, scheme.group_size or 1
    if scheme.per == "block":
        stored = scheme.block_structure or ()
        block = [str(part) for part in (stored.split("x") if isinstance(stored, str) else stored)]
        parts = [int(part) if part.isdecimal() and len(part) < 10 else 0 for part in block]
        if len(parts) != 2 or min(parts) < 1:
            raise wrong("block_structure", "[outputs, inputs], each at least 1", scheme.block_structure)
        return parts[0], parts[1]
    return None if scheme.per == "tensor" else (1, -1)


CT_VARIANTS = (f"compressed-tensors ({', '.join(CT_FORMATS)})",)

UNCOMPRESSED = ("initialized", "calibration", "frozen")  # statuses of models with plain weights
# Tensors beside a plain weight that compressed-tensors quantizes at run time.
RUNTIME_SCALES = (
    "weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale",
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
)  # fmt: skip
WEIGHT_TRANSFORMS = ("weight_input", "weight_output")  # locations of transforms applied to stored weights
CT_KEYS = ("config_groups", "sparsity_config")  # which no other method has
MIN_BIT_STREAM_VERSION = (0, 18)  # the version that packs 3, 5, 6 and 7 bits as a stream

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


def read_compressed_tensors(found: FoundConfig) -> Claims:
    """The claims of every group, and the loader that gives each module its own."""
    section = validate(_CompressedTensors, found)
    _refuse_unsupported(section, found)
    formats: dict[str, ConfiguredFormat] = {}
    plain: dict[str, ConfiguredFormat] = {}
    refused: dict[str, UnsupportedFormatError] = {}
    for name, group in section.config_groups.items():
        try:
            fmt = _group_format(found, name, group, section)
        except UnsupportedFormatError as error:
            refused[name] = error
            continue
        if fmt:
            formats[name] = fmt
        else:
            plain[name] = replace(PLAIN, activations=_group_activations(found, name, group, section))
    if refused and not formats:
        raise next(iter(refused.values()))
    quantized = [group for name, group in section.config_groups.items() if name in formats]
    packings = {group.format or section.format or "" for group in quantized}
    one = quantized[0].weights if len(set(formats.values())) == 1 else None
    return Claims(
        method="compressed-tensors",
        format=packings.pop() if len(packings) == 1 else "mixed-precision",
        bits=one.num_bits if one else None,
        group_size=one.rows_of_a_group if one else None,
        sym=one.symmetric if one else None,
        file=found.file,
        section=found.section,
        formats=tuple(dict.fromkeys(formats.values())),
        loader=_loader(
            section, formats, plain, refused, Patterns(found, "ignore"), Patterns(found, "config_groups")
        ),
        notes=_notes(section, found),
    )


def _loader(
    section: _CompressedTensors,
    formats: Mapping[str, ConfiguredFormat],
    plain: Mapping[str, ConfiguredFormat],
    refused: Mapping[str, UnsupportedFormatError],
    ignoring: Patterns,
    targeting: Patterns,
) -> Callable[[], FormatLoader]:
    """Build a factory of loaders that check `ignore` first, then the targets in their order of precedence.

    `refused`: the error of each group with an unsupported format.
    """
    ignore = tuple(section.ignore or ())
    everything = (*dict.fromkeys(formats.values()), PLAIN)
    ignored = FormatLoader(*everything, exclusions=IgnoredModules(ignore, patterns=ignoring))
    own = section.exclusions()
    targets = [(target, name) for name, group in section.config_groups.items() for target in group.targets]
    targets.sort(key=lambda pair: precedence(pair[0]))
    choices = [
        (matcher(target, patterns=targeting), unsupported_loader(refused[name]))
        if name in refused
        else _target_loader(target, formats.get(name) or plain[name], own, targeting, section)
        for target, name in targets
    ]
    keys = tuple(f"config_groups.{name}.targets" for name in section.config_groups)
    others = FormatLoader(*everything, exclusions=Untargeted(key=" or ".join(keys)))
    return lambda: ModuleLoader(
        [(matcher(*ignore, patterns=ignoring), ignored), *choices], others if formats else FormatLoader(PLAIN)
    )


def _target_loader(
    target: str, fmt: ConfiguredFormat, own: Exclusions, patterns: Patterns, section: _CompressedTensors
) -> tuple[Callable[[str], bool], FormatLoader]:
    """Build the loader of a target's modules."""
    plain = fmt.weight_type.plain
    loader = (
        FormatLoader(fmt) if plain else FormatLoader(fmt, *_calibrated_format(section), PLAIN, exclusions=own)
    )
    return matcher(target, patterns=patterns), loader


def _calibrated_format(section: _CompressedTensors) -> tuple[ConfiguredFormat, ...]:
    """Format of plain weights beside scales, in a model saved before compression."""
    if section.quantization_status not in UNCOMPRESSED:
        return ()
    why = (
        f"quantization_status is {section.quantization_status}: the stored weight is taken as it is; it is "
        "not quantized by the scales stored with it, as compressed-tensors does at run time"
    )
    config = UnquantizedConfig(unused=RUNTIME_SCALES, unused_because=why)
    return (ConfiguredFormat(UnquantizedWeight, config),)


def _group_format(
    found: FoundConfig, name: str, group: _Group, section: _CompressedTensors
) -> ConfiguredFormat | None:
    """The format of a group's weights, or None where they are plain."""
    key = f"config_groups.{name}"
    for target in group.targets:
        if target[0].isupper() and target.isidentifier() and target not in MODULE_CLASSES:
            raise UnsupportedFormatError(
                f"compressed-tensors for {target:.40}",
                f"a target of {found.key(key)} in {found.file}: no tensor tells of which class a module is",
                CT_VARIANTS,
            )
    stated = group.format or section.format
    if group.weights is None or stated == "dense":
        return None
    if stated is None:
        expected = "a format, there or for all groups"
        raise ConfigError(found.file, found.key(f"{key}.format"), expected, "nothing")
    version = re.match(r"(\d{1,9})\.(\d{1,9})", section.version or "")
    dense = (int(version[1]), int(version[2])) >= MIN_BIT_STREAM_VERSION if version else None
    inputs = _group_activations(found, name, group, section)
    static = inputs is not None and not inputs.dynamic

    def place(setting: str) -> str:
        return f"{key}.weights.{setting}" if setting else f"{key}.format" if group.format else "format"

    read_as = weight_format(found, place, stated, group.weights, static=static, dense=dense)
    claims = group.weights.claims(f"config_groups.{name}")
    return replace(read_as, activations=inputs, claims=claims)


def _group_activations(
    found: FoundConfig, name: str, group: _Group, section: _CompressedTensors
) -> ActivationScheme | None:
    """What a group declares of its inputs."""
    key, stated = f"config_groups.{name}.input_activations", group.format or section.format
    return activation_scheme(found, key, group.input_activations, stated)


def _refuse_unsupported(section: _CompressedTensors, found: FoundConfig) -> None:
    """What is known by name and not read, and a config that says nothing at all."""
    sparse = (section.sparsity_config or {}).get("format", "dense")
    if sparse != "dense":
        raise UnsupportedFormatError(
            f"compressed-tensors ({sparse!s:.40})",
            f"the format in sparsity_config of {found.file} has no reader",
            CT_VARIANTS,
        )
    if not section.config_groups and section.sparsity_config is None:
        raise ConfigError(found.file, found.key("config_groups"), "one or more groups", "none")
    if section.transform_config and any(section.transform_config.values()):
        online = sorted(_transform_locations(section.transform_config) - set(WEIGHT_TRANSFORMS))
        if online:
            raise UnsupportedFormatError(
                "compressed-tensors with transforms",
                f"the transform_config of {found.file} transforms inputs or outputs of layers at run time "
                f"({', '.join(online):.80}), and qload does not",
                CT_VARIANTS,
                "vLLM runs it",
            )


def _transform_locations(transforms: Mapping[str, Any]) -> set[str]:
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


def _notes(section: _CompressedTensors, found: FoundConfig) -> tuple[str, ...]:
    """What the config says that no weight depends on."""
    notes = [
        f"{found.file} has output_activations in config_groups.{name:.80}, and outputs stay as they are"
        for name, group in section.config_groups.items()
        if group.output_activations
    ]
    if section.transform_config and any(section.transform_config.values()):
        notes.append(
            f"the transform_config of {found.file} transforms weights alone: stored weights are transformed "
            "already, and are read as stored"
        )
    if section.kv_cache_scheme:
        notes.append(
            f"{found.file} has a kv_cache_scheme, whose scales are no weights and are left to the engine"
        )
    return tuple(notes)
