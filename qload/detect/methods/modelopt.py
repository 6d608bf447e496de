"""`quant_method: modelopt`, also in ModelOpt's own `hf_quant_config.json`.

One algorithm applies to all layers. With MIXED_PRECISION a table gives the algorithm of each layer:
`quantized_layers`, else `config_groups` with names of layers as targets. Names of algorithms are compared
without case, since ModelOpt writes `fp8_pb_wo` and `mxfp4` in lower case. Layers of an unsupported algorithm
are not read; the whole checkpoint is unsupported if no layer has another algorithm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from qload import configs
from qload.detect.methods.compressed_tensors import Untargeted
from qload.errors import UnsupportedFormatError
from qload.formats import (
    CTMXFP4Weight,
    Fp8Config,
    Fp8Weight,
    ModelOptAWQConfig,
    ModelOptAWQWeight,
    ModelOptInt8Config,
    ModelOptInt8Weight,
    ModelOptNVFP4ExtendedConfig,
    ModelOptNVFP4ExtendedWeight,
    ModelOptNVFP4Weight,
    MXFP4Config,
    MXFP8Config,
    MXFP8Weight,
    NVFP4Config,
)
from qload.loader import ConfiguredFormat
from qload.spec import ActivationScheme, Config, LayerClaims, Weight

Formats = tuple[ConfiguredFormat, ...]


@dataclass(frozen=True)
class Algorithm:
    """Possible formats of a `quant_algo`, their bits, and their group size, if fixed."""

    formats: Formats
    bits: int
    group_size: int | None = None

    def claimed(self, source: str) -> Formats:
        """Formats with the claims of this algorithm, stated by the entry `source` of the config."""
        claims = LayerClaims(self.bits, self.group_size, True, None, source)
        return tuple(replace(fmt, claims=claims) for fmt in self.formats)


def _algorithm_of(
    weight_type: type[Weight],
    config: Config,
    bits: int,
    group_size: int | None = None,
    inputs: ActivationScheme | None = None,
) -> Algorithm:
    """Algorithm with one format."""
    return Algorithm((ConfiguredFormat(weight_type, config, inputs),), bits, group_size)


STATIC_FP8 = ActivationScheme("float", 8, False, "tensor", scale="input_scale", owner="modelopt")
STATIC_INT8 = replace(STATIC_FP8, type="int")
DYNAMIC_FP8_TOKENS = ActivationScheme("float", 8, True, "token", owner="modelopt")
LOCAL_FP4 = ActivationScheme(
    "float", 4, "local", "tensor_group", 16, scale="input_scale", scale_type="e4m3", owner="modelopt"
)
DYNAMIC_MXFP8 = ActivationScheme("float", 8, True, "group", 32, scale_type="e8m0", owner="modelopt")
SAME_INPUT_TYPE = (
    "NVFP4",
    "NVFP4_AWQ",
    "NVFP4_SVD",
    "MXFP8",
    "FP8",
)  # inputs and weights have the same bits and group size
AWQ, AWQ_FP8_INPUTS, MIXED, BLOCK_SIZE = "W4A16_AWQ", "W4A8_AWQ", "MIXED_PRECISION", 128
NVFP4 = _algorithm_of(ModelOptNVFP4Weight, NVFP4Config(), 4, 16, LOCAL_FP4)
SCALED_NVFP4 = _algorithm_of(
    ModelOptNVFP4ExtendedWeight, ModelOptNVFP4ExtendedConfig(scaled_inputs=True), 4, 16, LOCAL_FP4
)
MXFP4_CONFIG = MXFP4Config(("weight", "weight_scale"))
ALGORITHMS = {
    "FP8": _algorithm_of(Fp8Weight, Fp8Config("tensor"), 8, inputs=STATIC_FP8),
    "FP8_PER_CHANNEL_PER_TOKEN": _algorithm_of(Fp8Weight, Fp8Config("channel"), 8, inputs=DYNAMIC_FP8_TOKENS),
    "FP8_PB_WO": _algorithm_of(
        Fp8Weight, Fp8Config("block", (BLOCK_SIZE, BLOCK_SIZE), axes="P"), 8, BLOCK_SIZE
    ),
    "NVFP4": NVFP4,
    "NVFP4_AWQ": replace(NVFP4, formats=NVFP4.formats + SCALED_NVFP4.formats),
    "NVFP4_SVD": _algorithm_of(
        ModelOptNVFP4ExtendedWeight, ModelOptNVFP4ExtendedConfig(low_rank=True), 4, 16, LOCAL_FP4
    ),
    "W4A16_NVFP4": _algorithm_of(ModelOptNVFP4Weight, NVFP4Config(), 4, 16),
    "W4A8_NVFP4_FP8": _algorithm_of(
        ModelOptNVFP4ExtendedWeight, ModelOptNVFP4ExtendedConfig(32), 4, 32, STATIC_FP8
    ),
    "MXFP8": _algorithm_of(MXFP8Weight, MXFP8Config(), 8, 32, DYNAMIC_MXFP8),
    # The algorithm does not state whether inputs are quantized.
    "MXFP4": _algorithm_of(CTMXFP4Weight, MXFP4_CONFIG, 4, 32),
    "W4A8_MXFP4_FP8": _algorithm_of(CTMXFP4Weight, MXFP4_CONFIG, 4, 32, STATIC_FP8),
    "W8A8_SQ_PER_CHANNEL": _algorithm_of(ModelOptInt8Weight, ModelOptInt8Config(), 8, inputs=STATIC_INT8),
}
GROUP_ALGORITHMS = {  # (bits, type, strategy, group size) of weights -> algorithm
    (8, "float", None, None): "FP8",
    (8, "float", "channel", None): "FP8_PER_CHANNEL_PER_TOKEN",
    (8, "float", None, 32): "MXFP8",
    (4, "float", None, 16): "NVFP4",
}
MODELOPT_VARIANTS = (f"modelopt (quant_algo {', '.join((*ALGORITHMS, AWQ, AWQ_FP8_INPUTS, MIXED))})",)

Size = Annotated[int, Field(ge=-1)] | None  # ModelOpt writes 0 or -1 for no group size
Entries = Annotated[list[str], AfterValidator(lambda names: [name for name in names if name])]


FormatsOrError = Formats | UnsupportedFormatError  # the error is raised for each layer


class _Layer(configs.Entry):
    quant_algo: str
    group_size: Size = None


class _NumberFormat(configs.Entry):
    num_bits: int
    type: str
    group_size: Size = None
    strategy: str | None = None


class _Group(configs.Entry):
    targets: list[Annotated[str, Field(min_length=1)]]
    weights: _NumberFormat
    input_activations: _NumberFormat | None = None


class _ModelOpt(configs.Section):
    quant_algo: str
    group_size: Size = None
    kv_cache_quant_algo: configs.Name = None
    exclude_modules: Entries | None = None
    ignore: Entries | None = None
    quantized_layers: dict[str, _Layer] | None = None
    has_zero_point: Literal[False] | None = None

    lists = ("exclude_modules", "ignore", "modules_to_not_convert")


class _Groups(configs.Section):
    config_groups: dict[str, _Group] | None = None


def read_modelopt(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of an algorithm for all layers, or of a table of layers."""
    section = configs.validate(_ModelOpt, source)
    for key in section.lists:
        configs.check_pattern_lengths(source, key, getattr(section, key) or ())
    name = section.quant_algo.lower()
    if section.quant_algo.upper() != MIXED:
        if section.quantized_layers:
            raise _unsupported(source, f"{section.quant_algo} with quantized_layers", "quantized_layers")
        _check_config_groups(source, section.quant_algo)
        algorithm = _algorithm(source, "group_size", section.quant_algo, section.group_size)
        claims = {"bits": algorithm.bits, "group_size": algorithm.group_size, "sym": True}
        exclusions = section.exclusions(configs.GlobExclusions)
        return section.claims(source, "modelopt", name, *algorithm.formats, **claims, exclusions=exclusions)
    table = _layer_formats(source, section)
    formats = dict.fromkeys(fmt for formats in table.values() for fmt in _supported(formats))
    refused = next((error for error in table.values() if isinstance(error, UnsupportedFormatError)), None)
    if refused and not formats:
        raise refused
    return section.claims(
        source,
        "modelopt",
        name,
        *formats,
        sym=True,
        exclusions=section.exclusions(configs.GlobExclusions),
        rules=_rules(section, table),
    )


def _algorithm(source: configs.FoundConfig, key: str, stated: str, size: int | None) -> Algorithm:
    """Algorithm with this name and group size; errors name `key`."""
    name, size = stated.upper(), max(size or 0, 0)
    if name in (AWQ, AWQ_FP8_INPUTS):
        config = ModelOptAWQConfig(size, fp8_inputs=name == AWQ_FP8_INPUTS)
        inputs = STATIC_FP8 if config.fp8_inputs else None
        return _algorithm_of(ModelOptAWQWeight, config, 4, size or None, inputs)
    if name not in ALGORITHMS:
        raise _unsupported(source, stated, f"{key.removesuffix('group_size')}quant_algo")
    algorithm = ALGORITHMS[name]
    if size and algorithm.group_size not in (None, size):
        raise source.error(key, f"{algorithm.group_size} with {stated}", configs.value_text(size))
    return algorithm


def _check_config_groups(source: configs.FoundConfig, stated: str) -> None:
    """Raise ConfigError if `config_groups` contradicts the bits or group size of the algorithm."""
    algorithm, groups = ALGORITHMS.get(stated.upper()), source.values.get("config_groups")
    if algorithm is None or not isinstance(groups, dict):
        return
    fixed = {"num_bits": algorithm.bits, "group_size": algorithm.group_size}
    parts = ("weights", "input_activations") if stated.upper() in SAME_INPUT_TYPE else ("weights",)
    for group, part, (key, expected) in product(groups, parts, fixed.items()):
        numbers = groups[group].get(part) if isinstance(groups[group], dict) else None
        value = numbers.get(key) if isinstance(numbers, dict) else None
        if type(value) is int and value and expected not in (None, value):
            key_path = f"config_groups.{group:.80}.{part}.{key}"
            raise source.error(key_path, f"{expected} with {stated}", configs.value_text(value))


def _supported(formats: FormatsOrError) -> Formats:
    """Return the formats; none for an error."""
    return () if isinstance(formats, UnsupportedFormatError) else formats


def _layer_formats(source: configs.FoundConfig, section: _ModelOpt) -> dict[str, FormatsOrError]:
    """Map each layer to its formats, or to the error of an unsupported format."""
    if section.quantized_layers:
        return {name: _layer_format(source, name, layer) for name, layer in section.quantized_layers.items()}
    groups = configs.validate(_Groups, source).config_groups
    if not groups:
        raise source.error("quantized_layers", f"layers with their quant_algo, for {MIXED}", "nothing")
    return {
        target: _group_format(source, name, group)
        for name, group in groups.items()
        for target in group.targets
    }


def _layer_format(source: configs.FoundConfig, name: str, layer: _Layer) -> FormatsOrError:
    """Formats of an entry of `quantized_layers`, or the error of an unsupported one."""
    key = f"quantized_layers.{name:.80}.group_size"
    try:
        return _algorithm(source, key, layer.quant_algo, layer.group_size).claimed("quantized_layers")
    except UnsupportedFormatError as error:
        return error


def _group_format(source: configs.FoundConfig, group_name: str, group: _Group) -> FormatsOrError:
    """Formats of an entry of `config_groups`, by weights and inputs, or the error of an unsupported one."""
    weights, inputs = group.weights, group.input_activations
    scheme = (weights.num_bits, weights.type, weights.strategy, weights.group_size)
    name = GROUP_ALGORITHMS.get(scheme, AWQ if scheme[:3] == (4, "int", None) else "")
    if not name or (inputs is not None and inputs.num_bits != weights.num_bits):
        variant = f"{weights.type:.20} of {weights.num_bits} bits in config_groups"
        part = "input_activations" if name else "weights"
        return _unsupported(source, variant, f"config_groups.{group_name:.80}.{part}")
    if name == "NVFP4" and inputs is None:
        name = "W4A16_NVFP4"
    formats = _algorithm(source, "config_groups", name, weights.group_size).claimed("config_groups")
    return formats if inputs is not None else tuple(replace(fmt, activations=None) for fmt in formats)


def _rules(section: _ModelOpt, table: Mapping[str, FormatsOrError]) -> tuple[configs.ModuleRule, ...]:
    """Rules of the listed layers, one for equal formats and for each error; all other layers are plain."""
    names: dict[tuple[Formats, ActivationScheme | None], set[str]] = {}
    refused: dict[str, tuple[UnsupportedFormatError, set[str]]] = {}
    for name, formats in table.items():
        if isinstance(formats, UnsupportedFormatError):
            refused.setdefault(formats.format, (formats, set()))[1].add(name)
        else:
            names.setdefault((formats, formats[0].activations), set()).add(name)
    exclusions = section.exclusions(configs.GlobExclusions)
    every = tuple(dict.fromkeys(fmt for formats, _ in names for fmt in formats))
    return (
        *(
            configs.ModuleRule(formats, partial(_is_listed, frozenset(layers)), exclusions)
            for (formats, _), layers in names.items()
        ),
        *(
            configs.ModuleRule(error, partial(_is_listed, frozenset(layers)))
            for error, layers in refused.values()
        ),
        configs.ModuleRule(every, exclusions=Untargeted(key="quantized_layers")),
    )


def _is_listed(names: frozenset[str], module: str) -> bool:
    """Return whether the last segments of a module, or of the experts that include it, are a listed name."""
    *parents, _ = module.split(".")
    paths = [module, *(".".join(parents[:at]) for at, part in enumerate(parents) if part.isdecimal())]
    candidates = (path.split(".") for path in paths if path == module or path.endswith("experts"))
    return any(".".join(path[at:]) in names for path in candidates for at in range(len(path)))


def _unsupported(source: configs.FoundConfig, variant: str, key: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"modelopt ({variant:.60})",
        f"the {key} of {source.file} is not supported",
        MODELOPT_VARIANTS,
        "TensorRT-LLM loads what ModelOpt exports, vLLM and SGLang load most of it",
    )


WEIGHT_TYPES = (
    Fp8Weight,
    ModelOptNVFP4Weight,
    ModelOptNVFP4ExtendedWeight,
    MXFP8Weight,
    CTMXFP4Weight,
    ModelOptAWQWeight,
    ModelOptInt8Weight,
)
METHODS = (
    configs.Method(
        names=("modelopt",),
        read=read_modelopt,
        formats=WEIGHT_TYPES,
        variants=MODELOPT_VARIANTS,
        activation_key="quant_algo",
        exclusion_key="exclude_modules, or ignore in config.json",
    ),
)
