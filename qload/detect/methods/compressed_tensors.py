"""`quant_method: compressed-tensors`: groups of modules, each with its own scheme and format.

The name of a module selects its group (`configs.matching`). Of several matching entries, names precede
patterns and patterns precede classes; of one kind the first counts. `ignore` precedes all. A module without
an entry is not quantized. Any module may still be stored plain: the target `Linear` does not tell linear
modules apart, their tensors do.

The formats of weights follow from a group's scheme and `format`. No weight depends on its
`input_activations`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import Field

from qload import configs
from qload.configs.matching import EMBEDDINGS, LINEAR_CLASS, MODULE_CLASSES, precedence
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats import (
    CTMXFP4Weight,
    CTNVFP4Weight,
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
from qload.formats.compressed_tensors.integers import CTIntConfig, CTIntWeight
from qload.formats.compressed_tensors.packed import CTPackConfig, CTPackWeight
from qload.formats.compressed_tensors.packed_tensor import CTPackTensorConfig, CTPackTensorWeight
from qload.formats.unquantized import PLAIN
from qload.loader import ConfiguredFormat
from qload.loader.exclusion import Exclusions
from qload.loader.transforms import TransformRule
from qload.spec import ActivationScheme, LayerClaims

# `dynamic` -> name of the stored scale; "local": the scale of the tensor, applied with dynamic group scales.
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
MX_GROUP_SIZE = 32  # inputs with one power of two
GROUPED_STRATEGIES = ("group", "tensor_group")


class _Activations(configs.Entry):
    """Declared quantization of inputs, with the defaults of compressed-tensors."""

    num_bits: Annotated[int, Field(ge=1, le=64)] = 8
    type: Literal["int", "float"] = "int"
    dynamic: bool | Literal["local"] | None = False
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: str | None = None

    @property
    def shared_by(self) -> str:
        """Strategy: which inputs share a scale; inferred from the group size as by compressed-tensors."""
        inferred = "tensor" if self.group_size is None else "group" if self.group_size > 0 else "channel"
        return self.strategy or inferred


def activation_scheme(
    source: configs.FoundConfig, key: str, stated: Mapping[str, Any] | None, weights: str | None
) -> ActivationScheme | None:
    """Read the activation scheme under a key of the config; None without one, ConfigError if malformed.

    `weights`: format of the group's weights; it implies the type of scales in versions that do not state it.
    """
    if not stated:
        return None
    section = configs.FoundConfig(source.file, source.key(key), stated)
    inputs = configs.validate(_Activations, section)
    dynamic, grouped = inputs.dynamic or False, inputs.shared_by in GROUPED_STRATEGIES
    if grouped and (inputs.group_size or 0) < 1:
        raise source.error(f"{key}.group_size", "at least 1", configs.value_text(inputs.group_size))
    scale_type: ScaleType = SCALE_TYPES.get(inputs.scale_dtype, "float32")
    is_mx = inputs.group_size == MX_GROUP_SIZE and (weights or "").startswith("mxfp")
    if inputs.scale_dtype is None and (dynamic == "local" or is_mx):
        scale_type = "e4m3" if dynamic == "local" else "e8m0"
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


# Format -> its number types, its bits, and its strategies of sharing scales.
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


class Scheme(configs.Entry):
    """Quantization scheme of the weights of a group."""

    num_bits: int
    type: Literal["int", "float"] = "int"
    strategy: Strategy | None = None
    group_size: Annotated[int, Field(ge=-1)] | None = None
    block_structure: list[Annotated[int, Field(ge=1)]] | str | None = None
    symmetric: bool = True
    actorder: Literal["group", "weight", "dynamic", "static"] | bool | None = None

    def claims(self, source: str) -> LayerClaims:
        """Claims about each layer of the scheme; `source`: path of the scheme in the config."""
        ordered = self.actorder in ("group", "dynamic", True)
        act_order = ordered if "actorder" in self.model_fields_set else None
        return LayerClaims(self.num_bits, self.rows_of_a_group, self.symmetric, act_order, source)

    @property
    def per(self) -> str:
        """Strategy: which weights share a scale; inferred from the group size if not stated."""
        default = "tensor" if self.group_size is None else "group" if self.group_size > 0 else "channel"
        return self.strategy or default

    @property
    def rows_of_a_group(self) -> int | None:
        """Inputs per scale; -1: all inputs; None without groups."""
        if self.per in GROUPED_STRATEGIES:
            return self.group_size
        return -1 if self.per == "channel" else None


def weight_format(
    source: configs.FoundConfig,
    key: Callable[[str], str],
    stated: str,
    scheme: Scheme,
    *,
    static: bool,
    dense: bool | None,
) -> ConfiguredFormat:
    """Format of a scheme's weights.

    `key`: path of a setting in the config, by its name, or of the format, by "". `static`: activations have
    stored scales. `dense`: the version packs codes as a bit stream; None if unknown.
    """
    if stated not in CT_FORMATS:
        raise UnsupportedFormatError(
            f"compressed-tensors ({stated:.40})",
            f"{source.key(key(''))} of {source.file} is not supported",
            (*CT_FORMATS,),
        )
    block, size = _checked_block(source, key, stated, scheme), scheme.rows_of_a_group or -1
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
    source: configs.FoundConfig, key: Callable[[str], str], stated: str, scheme: Scheme
) -> tuple[int, int] | None:
    """(outputs, inputs) per scale; None for one scale; ConfigError for a scheme unknown to the format."""
    types, bits, strategies = CT_FORMATS[stated]
    bits = range(8, 9) if scheme.type == "float" and stated == "naive-quantized" else bits

    def wrong(name: str, expected: str, got: Any) -> ConfigError:
        return source.error(key(name), f"{expected} in {stated}", configs.value_text(got))

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
# Tensors stored with a plain weight that compressed-tensors quantizes at run time.
RUNTIME_SCALES = (
    "weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale",
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
)  # fmt: skip
WEIGHT_TRANSFORMS = ("weight_input", "weight_output")  # locations of transforms applied to stored weights
ONLINE_TRANSFORMS: Mapping[str, Literal["inputs", "outputs"]] = {"input": "inputs", "output": "outputs"}
ATTENTION_TRANSFORMS = frozenset(("q_attn", "k_cache"))  # of queries and keys alike: no product changes
CT_KEYS = ("config_groups", "sparsity_config")  # keys of no other method
MIN_BIT_STREAM_VERSION = (0, 18)  # first version that packs 3, 5, 6 and 7 bits as a stream


class _Group(configs.Entry):
    targets: configs.NameList
    weights: Scheme | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class _TransformStep(configs.Entry):
    targets: configs.NameList
    location: str
    inverse: bool = False
    ignore: configs.NameList | None = None


class _TransformScheme(configs.Entry):
    apply: Annotated[list[_TransformStep], Field(min_length=1)]
    head_dim: Annotated[int, Field(ge=1)] | None = None
    randomize: bool = False


class _Transforms(configs.Entry):
    config_groups: dict[str, _TransformScheme] = Field(default_factory=dict)


class _CompressedTensors(configs.Section):
    config_groups: dict[str, _Group] = Field(default_factory=dict)
    format: str | None = None
    ignore: configs.NameList | None = None
    quantization_status: Literal["initialized", "calibration", "frozen", "compressed"] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: _Transforms | None = None
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
        transforms=_transforms(section, source),
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
    keys = set((section.transform_config.model_extra or {}) if section.transform_config else ())
    known = {*WEIGHT_TRANSFORMS, *ONLINE_TRANSFORMS, *ATTENTION_TRANSFORMS}
    unknown = sorted((_locations(section) | keys) - known)
    if 0 < len(ATTENTION_TRANSFORMS & _locations(section)) < len(ATTENTION_TRANSFORMS):
        unknown = [f"one of {' and '.join(sorted(ATTENTION_TRANSFORMS))}"]
    if unknown:
        reason = f"the transform_config of {source.file} has the location or key {', '.join(unknown):.80}"
        name = "compressed-tensors with transforms"
        raise UnsupportedFormatError(name, reason, CT_VARIANTS, "vLLM runs it")


def _schemes(section: _CompressedTensors) -> Mapping[str, _TransformScheme]:
    return section.transform_config.config_groups if section.transform_config else {}


def _locations(section: _CompressedTensors) -> set[str]:
    """Collect the locations of transforms."""
    return {step.location for scheme in _schemes(section).values() for step in scheme.apply}


def _transforms(section: _CompressedTensors, source: configs.FoundConfig) -> tuple[TransformRule, ...]:
    """Transforms of inputs and outputs that layers apply when they run."""
    patterns = configs.Patterns(source, "transform_config")
    return tuple(
        TransformRule(
            f"{name}_{step.location}",
            ONLINE_TRANSFORMS[step.location],
            step.inverse,
            scheme.head_dim,
            _Selection(
                LINEAR_CLASS in step.targets,
                configs.matcher(*(t for t in step.targets if t != LINEAR_CLASS), patterns=patterns),
                configs.matcher(*step.ignore or (), patterns=patterns),
            ),
            scheme.randomize,
        )
        for name, scheme in _schemes(section).items()
        for step in scheme.apply
        if step.location in ONLINE_TRANSFORMS
    )


@dataclass(frozen=True)
class _Selection:
    """Predicate of the modules that targets select and a list does not ignore; no embedding is linear."""

    every_linear: bool
    targets: Callable[[str], bool]
    ignored: Callable[[str], bool]

    def __call__(self, module: str) -> bool:
        linear = self.every_linear and module.rpartition(".")[2] not in EMBEDDINGS
        return (linear or self.targets(module)) and not self.ignored(module)


def _notes(section: _CompressedTensors, source: configs.FoundConfig) -> tuple[str, ...]:
    """Notes on keys that change no weight."""
    notes = [
        f"{source.file} has output_activations in config_groups.{name:.80}, and outputs stay as they are"
        for name, group in section.config_groups.items()
        if group.output_activations
    ]
    if not _locations(section).isdisjoint(WEIGHT_TRANSFORMS) and _locations(section) <= {*WEIGHT_TRANSFORMS}:
        notes.append(
            f"the transform_config of {source.file} transforms weights alone: stored weights are transformed "
            "already, and are read as stored"
        )
    if not _locations(section).isdisjoint(ATTENTION_TRANSFORMS):
        notes.append(
            f"the transform_config of {source.file} transforms queries and keys alike, which changes no "
            "product of them; it is left to the engine"
        )
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
