"""`quant_method: modelopt`, and `hf_quant_config.json`, which ModelOpt writes beside the other config.

One algorithm holds for all layers. With MIXED_PRECISION a table gives the algorithm of each layer:
`quantized_layers`, else `config_groups` with names of layers as targets. Names of algorithms are compared
without case, since ModelOpt writes `fp8_pb_wo` and `mxfp4` in lower case. Layers of an unsupported algorithm
are not read; the whole checkpoint is unsupported if no layer has another algorithm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from qload.detect.files import FoundConfig, shown
from qload.detect.matching import PLAIN, GlobExclusions, check_pattern_lengths, unsupported_loader
from qload.detect.methods.compressed_tensors import Untargeted
from qload.detect.validation import Claims, Name, Section, validate
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats import (
    CTMXFP4Weight,
    Fp8Config,
    Fp8Weight,
    ModelOptAWQConfig,
    ModelOptAWQWeight,
    ModelOptNVFP4Weight,
    MXFP4Config,
    MXFP8Config,
    MXFP8Weight,
    NVFP4Config,
)
from qload.loader import ConfiguredFormat, FormatLoader
from qload.loader.modules import ModuleLoader
from qload.spec import ActivationScheme, LayerClaims


@dataclass(frozen=True)
class Algorithm:
    """What a `quant_algo` stores: a format, its bits, and the group size where there is only one."""

    format: ConfiguredFormat
    bits: int
    group_size: int | None = None

    def claimed(self, source: str) -> ConfiguredFormat:
        """Format with the claims of this algorithm, stated by the entry `source` of the config."""
        return replace(self.format, claims=LayerClaims(self.bits, self.group_size, True, None, source))


STATIC_FP8 = ActivationScheme("float", 8, False, "tensor", scale="input_scale", owner="modelopt")
DYNAMIC_FP8_TOKENS = ActivationScheme("float", 8, True, "token", owner="modelopt")
LOCAL_FP4 = ActivationScheme(
    "float", 4, "local", "tensor_group", 16, scale="input_scale", scale_type="e4m3", owner="modelopt"
)
DYNAMIC_MXFP8 = ActivationScheme("float", 8, True, "group", 32, scale_type="e8m0", owner="modelopt")
SAME_INPUT_TYPE = ("NVFP4", "MXFP8", "FP8")  # whose inputs have the numbers of the weights
AWQ, MIXED, BLOCK_SIZE = "W4A16_AWQ", "MIXED_PRECISION", 128
ALGORITHMS = {
    "FP8": Algorithm(ConfiguredFormat(Fp8Weight, Fp8Config("tensor"), STATIC_FP8), 8),
    "FP8_PER_CHANNEL_PER_TOKEN": Algorithm(
        ConfiguredFormat(Fp8Weight, Fp8Config("channel"), DYNAMIC_FP8_TOKENS), 8
    ),
    "FP8_PB_WO": Algorithm(
        ConfiguredFormat(Fp8Weight, Fp8Config("block", (BLOCK_SIZE, BLOCK_SIZE), axes="P")), 8, BLOCK_SIZE
    ),
    "NVFP4": Algorithm(ConfiguredFormat(ModelOptNVFP4Weight, NVFP4Config(), LOCAL_FP4), 4, 16),
    "W4A16_NVFP4": Algorithm(ConfiguredFormat(ModelOptNVFP4Weight, NVFP4Config()), 4, 16),
    "MXFP8": Algorithm(ConfiguredFormat(MXFP8Weight, MXFP8Config(), DYNAMIC_MXFP8), 8, 32),
    # The algorithm does not state whether inputs are quantized.
    "MXFP4": Algorithm(ConfiguredFormat(CTMXFP4Weight, MXFP4Config(("weight", "weight_scale"))), 4, 32),
}
ACTIVATION_WEIGHTS = tuple(
    dict.fromkeys(one.format.weight_type for one in ALGORITHMS.values() if one.format.activations)
)
GROUP_ALGORITHMS = {  # by the bits, type, strategy and group size of weights
    (8, "float", None, None): "FP8",
    (8, "float", "channel", None): "FP8_PER_CHANNEL_PER_TOKEN",
    (8, "float", None, 32): "MXFP8",
    (4, "float", None, 16): "NVFP4",
}
MODELOPT_VARIANTS = (f"modelopt (quant_algo {', '.join((*ALGORITHMS, AWQ, MIXED))})",)

Size = Annotated[int, Field(ge=-1)] | None  # ModelOpt writes 0 or -1 for no group size
Entries = Annotated[list[str], AfterValidator(lambda names: [name for name in names if name])]


Format = ConfiguredFormat | UnsupportedFormatError  # the error is raised for each layer


class _Strict(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="allow")


class _Layer(_Strict):
    quant_algo: str
    group_size: Size = None


class _NumberFormat(_Strict):
    num_bits: int
    type: str
    group_size: Size = None
    strategy: str | None = None


class _Group(_Strict):
    targets: list[Annotated[str, Field(min_length=1)]]
    weights: _NumberFormat
    input_activations: _NumberFormat | None = None


class _ModelOpt(Section):
    quant_algo: str
    group_size: Size = None
    kv_cache_quant_algo: Name = None
    exclude_modules: Entries | None = None
    ignore: Entries | None = None
    quantized_layers: dict[str, _Layer] | None = None
    has_zero_point: Literal[False] | None = None

    lists = ("exclude_modules", "ignore", "modules_to_not_convert")


class _Groups(Section):
    config_groups: dict[str, _Group] | None = None


def read_modelopt(found: FoundConfig) -> Claims:
    """The claims of an algorithm for all layers, or of a table of layers."""
    section = validate(_ModelOpt, found)
    for key in section.lists:
        check_pattern_lengths(found, key, getattr(section, key) or ())
    mixed = section.quant_algo.upper() == MIXED
    if not mixed and section.quantized_layers:
        raise _unsupported(found, f"{section.quant_algo} with quantized_layers", "quantized_layers")
    table = _layer_formats(found, section) if mixed else {}
    if not mixed:
        _check_config_groups(found, section.quant_algo)
    one = None if mixed else _algorithm(found, "group_size", section.quant_algo, section.group_size)
    formats = tuple(dict.fromkeys(fmt for fmt in table.values() if isinstance(fmt, ConfiguredFormat)))
    refused = next((fmt for fmt in table.values() if isinstance(fmt, UnsupportedFormatError)), None)
    if refused and not formats:
        raise refused
    return Claims(
        method="modelopt",
        format=section.quant_algo.lower(),
        bits=one.bits if one else None,
        group_size=one.group_size if one else None,
        sym=True,
        file=found.file,
        section=found.section,
        exclusions=section.exclusions(GlobExclusions),
        formats=(one.format,) if one else formats,
        loader=_loader_factory(section, table) if mixed else None,
    )


def _algorithm(found: FoundConfig, key: str, stated: str, size: int | None) -> Algorithm:
    """What an algorithm of this name stores, in groups of this size; errors name the key."""
    name, size = stated.upper(), max(size or 0, 0)
    if name == AWQ:
        return Algorithm(ConfiguredFormat(ModelOptAWQWeight, ModelOptAWQConfig(size)), 4, size or None)
    if name not in ALGORITHMS:
        raise _unsupported(found, stated, f"{key.removesuffix('group_size')}quant_algo")
    algorithm = ALGORITHMS[name]
    if size and algorithm.group_size not in (None, size):
        raise ConfigError(found.file, found.key(key), f"{algorithm.group_size} with {stated}", shown(size))
    return algorithm


def _check_config_groups(found: FoundConfig, stated: str) -> None:
    """The numbers that `config_groups` states beside one algorithm are those that the algorithm fixes."""
    algorithm, groups = ALGORITHMS.get(stated.upper()), found.values.get("config_groups")
    if algorithm is None or not isinstance(groups, dict):
        return
    fixed = {"num_bits": algorithm.bits, "group_size": algorithm.group_size}
    parts = ("weights", "input_activations") if stated.upper() in SAME_INPUT_TYPE else ("weights",)
    for group, part, (key, expected) in product(groups, parts, fixed.items()):
        numbers = groups[group].get(part) if isinstance(groups[group], dict) else None
        said = numbers.get(key) if isinstance(numbers, dict) else None
        if type(said) is int and said and expected not in (None, said):
            where = found.key(f"config_groups.{group:.80}.{part}.{key}")
            raise ConfigError(found.file, where, f"{expected} with {stated}", shown(said))


def _layer_formats(found: FoundConfig, section: _ModelOpt) -> dict[str, Format]:
    """Map each layer to its format, or to the error of an unsupported one."""
    if section.quantized_layers:
        return {name: _layer_format(found, name, layer) for name, layer in section.quantized_layers.items()}
    groups = validate(_Groups, found).config_groups
    if not groups:
        expected = f"layers, each with its quant_algo, beside {MIXED}"
        raise ConfigError(found.file, found.key("quantized_layers"), expected, "nothing")
    return {
        target: _group_format(found, name, group)
        for name, group in groups.items()
        for target in group.targets
    }


def _layer_format(found: FoundConfig, name: str, layer: _Layer) -> Format:
    """Format of an entry of `quantized_layers`, or the error of an unsupported one."""
    key = f"quantized_layers.{name:.80}.group_size"
    try:
        return _algorithm(found, key, layer.quant_algo, layer.group_size).claimed("quantized_layers")
    except UnsupportedFormatError as error:
        return error


def _group_format(found: FoundConfig, group_name: str, group: _Group) -> Format:
    """Format of an entry of `config_groups`, by weights and inputs, or the error of an unsupported one."""
    weights, inputs = group.weights, group.input_activations
    said = (weights.num_bits, weights.type, weights.strategy, weights.group_size)
    name = GROUP_ALGORITHMS.get(said, AWQ if said[:3] == (4, "int", None) else "")
    if not name or (inputs is not None and inputs.num_bits != weights.num_bits):
        what = f"{weights.type:.20} of {weights.num_bits} bits in config_groups"
        part = "input_activations" if name else "weights"
        return _unsupported(found, what, f"config_groups.{group_name:.80}.{part}")
    if name == "NVFP4" and inputs is None:
        name = "W4A16_NVFP4"
    fmt = _algorithm(found, "config_groups", name, weights.group_size).claimed("config_groups")
    return fmt if inputs is not None else replace(fmt, activations=None)


def _loader_factory(section: _ModelOpt, table: Mapping[str, Format]) -> Callable[[], FormatLoader]:
    """What makes a loader that knows each layer of the table by name, and finds all others plain."""
    names: dict[tuple[ConfiguredFormat, ActivationScheme | None], set[str]] = {}
    refused: dict[str, tuple[UnsupportedFormatError, set[str]]] = {}
    for name, fmt in table.items():
        if isinstance(fmt, UnsupportedFormatError):
            refused.setdefault(fmt.format, (fmt, set()))[1].add(name)
        else:
            names.setdefault((fmt, fmt.activations), set()).add(name)
    own = section.exclusions(GlobExclusions)
    choices: list[tuple[Callable[[str], bool], FormatLoader]] = [
        (partial(_is_listed, frozenset(those)), FormatLoader(fmt, PLAIN, exclusions=own))
        for (fmt, _), those in names.items()
    ]
    choices += [
        (partial(_is_listed, frozenset(those)), unsupported_loader(error))
        for error, those in refused.values()
    ]
    formats = dict.fromkeys(fmt for fmt, _ in names)
    others = FormatLoader(*formats, PLAIN, exclusions=Untargeted(key="quantized_layers"))
    return lambda: ModuleLoader(choices, others)


def _is_listed(names: frozenset[str], module: str) -> bool:
    """Whether a module, or the experts that it is one of, has one of these names, whatever is before it."""
    *lead, _ = module.split(".")
    holders = [module, *(".".join(lead[:at]) for at, one in enumerate(lead) if one.isdecimal())]
    known = (own.split(".") for own in holders if own == module or own.endswith("experts"))
    return any(".".join(own[at:]) in names for own in known for at in range(len(own)))


def _unsupported(found: FoundConfig, what: str, key: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"modelopt ({what:.60})",
        f"the {key} of {found.file} has no reader",
        MODELOPT_VARIANTS,
        "TensorRT-LLM loads what ModelOpt exports, vLLM and SGLang load most of it",
    )
