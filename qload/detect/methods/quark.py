"""`quant_method: quark`: types of weights by `global_quant_config`, and by pattern in `layer_quant_config`.

    {"global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group", "group_size": 128}, ...},
     "layer_quant_config": {"*.down_proj": {"weight": {...}}, ...}, "exclude": ["lm_head"],
     "export": {"pack_method": "reorder", ...}}

    dtype               qscheme                           read as
    fp8_e4m3, fp8_e5m2  per_tensor, per_channel           fp8
    fp8_e4m3            per_block                         fp8 in blocks
    fp8_e4m3            per_group of 32, e8m0             MXFP8
    int8                per_tensor, per_channel           int-quantized of compressed-tensors
    int4, uint4         per_group                         quark_int4
    fp4                 per_group of 32, e8m0             MXFP4
    fp6_e2m3, fp6_e3m2  per_group of 32, e8m0             quark_mxfp6

Zero points of int8 that are all 0 are left out. The first pattern that matches a module counts. Quantized
inputs get a note, and linears do not quantize them. Layers of other types are not read; if all types are
others, the whole checkpoint is unsupported, and so is one with rotations of inputs at runtime. Source:
amd-quark 0.13.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from qload import configs
from qload.errors import UnsupportedFormatError
from qload.formats import (
    CTIntConfig,
    CTIntWeight,
    CTMXFP4Weight,
    Fp8Config,
    Fp8Weight,
    MXFP4Config,
    MXFP8Config,
    MXFP8Weight,
    QuarkInt4Config,
    QuarkInt4Weight,
    QuarkMXFP6Config,
    QuarkMXFP6Weight,
)
from qload.formats.mx import GROUP
from qload.loader import ConfiguredFormat
from qload.loader.description import ROTATED
from qload.spec import LayerClaims
from qload.storage import WeightStorage

VARIANTS = ("quark (fp8, int8, int4, uint4, mxfp4, mxfp6, mxfp8)",)
REMEDY = "transformers loads it where amd-quark is installed, and vLLM loads most of it"
POWERS = "e8m0"
AXES: Mapping[str, tuple[int, ...]] = {"per_channel": (0,), "per_group": (-1, 1)}  # of a weight (N, K)
SHARED_ROTATION = "shared_input_rotation_"  # at the top level: one matrix for many layers
MXFP4 = MXFP4Config(("weight", "weight_scale"))
BITS = {
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "int8": 8,
    "int4": 4,
    "uint4": 4,
    "fp4": 4,
    "fp6_e2m3": 6,
    "fp6_e3m2": 6,
}

Format = ConfiguredFormat | UnsupportedFormatError


class _Tensor(configs.Entry):
    dtype: str
    qscheme: str | None = None
    group_size: Annotated[int, Field(ge=1)] | None = None
    block_size: configs.Block | None = None
    scale_format: str | None = None
    ch_axis: int | None = None
    symmetric: bool | None = None
    zero_point_type: str | None = None

    @property
    def has_usual_axis(self) -> bool:
        """Whether each output, or each group of inputs, has a scale."""
        return self.ch_axis is None or self.ch_axis in AXES.get(self.qscheme or "", (self.ch_axis,))


class _Layer(configs.Entry):
    weight: Any = None  # one type, or a list of them
    bias: Any = None
    input_tensors: dict[str, Any] | list[Any] | None = None


class _Export(configs.Entry):
    pack_method: Literal["reorder", "order"] = "reorder"
    weight_format: str | None = None


class _Algorithm(configs.Entry):
    name: str | None = None
    r1: bool | None = None
    r4: bool | None = None
    online_r1_rotation: bool | None = None
    online_config: Any = None

    @property
    def rotates_inputs(self) -> bool:
        """Whether layers rotate their inputs at runtime; R2 is in the weights, R3 in attention."""
        if self.name != "rotation":
            return False
        return bool(self.r4 or self.online_config or (self.r1 is not False and self.online_r1_rotation))


class _Quark(configs.Section):
    algo_config: list[_Algorithm] | _Algorithm | None = None
    global_quant_config: _Layer | None = None
    layer_quant_config: dict[str, _Layer | None] | None = None
    layer_type_quant_config: dict[str, Any] | None = None
    exclude: configs.NameList | None = None
    export: _Export = Field(default_factory=_Export)

    lists = ("exclude", "modules_to_not_convert")


@dataclass(frozen=True)
class GlobModules:
    """Predicate on modules: True if a shell pattern matches."""

    patterns: configs.GlobExclusions

    def __call__(self, module: str) -> bool:
        """Return whether the pattern matches a module or one above it."""
        return self.patterns.selects(module)


def read_quark(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of the config, with a rule for each pattern."""
    section = configs.validate(_Quark, source)
    patterns = section.layer_quant_config or {}
    for key in ("exclude", "modules_to_not_convert"):
        configs.check_pattern_lengths(source, key, getattr(section, key) or ())
    configs.check_pattern_lengths(source, "layer_quant_config", patterns)
    if section.export.weight_format == "fake_quantized":
        raise _unsupported(source, "weight_format fake_quantized", "export.weight_format")
    if section.layer_type_quant_config:
        raise _unsupported(source, "layer_type_quant_config", "layer_type_quant_config")
    algorithms = section.algo_config or []
    for at, algorithm in enumerate(algorithms if isinstance(algorithms, list) else [algorithms]):
        if algorithm.rotates_inputs:
            raise _unsupported(source, "rotation of inputs at runtime", f"algo_config.{at}")
    read = partial(_format, source, section.export.pack_method == "reorder")
    default = read("global_quant_config", section.global_quant_config)
    entries = {
        pattern: read(f"layer_quant_config.{pattern:.80}", layer) for pattern, layer in patterns.items()
    }
    stated = [fmt for fmt in (default, *entries.values()) if fmt is not None]
    formats = tuple(dict.fromkeys(fmt for fmt in stated if isinstance(fmt, ConfiguredFormat)))
    refused = next((fmt for fmt in stated if isinstance(fmt, UnsupportedFormatError)), None)
    if refused and not formats:
        raise refused
    exclusions = section.exclusions(configs.GlobExclusions)
    rules = [
        configs.ModuleRule(_formats(fmt), GlobModules(configs.GlobExclusions((pattern,))), exclusions)
        for pattern, fmt in entries.items()
    ]
    claims = default.claims if isinstance(default, ConfiguredFormat) else None
    return section.claims(
        source,
        "quark",
        _name(section.global_quant_config),
        *formats,
        bits=claims.bits if claims else None,
        group_size=claims.group_size if claims else None,
        exclusions=exclusions,
        rules=(*rules, configs.ModuleRule(_formats(default), exclusions=exclusions)) if rules else (),
        notes=tuple(_notes(source, [section.global_quant_config, *patterns.values()])),
    )


def check_rotation(
    claims: configs.Claims, source: configs.FoundConfig, storage: WeightStorage
) -> configs.Claims:
    """Return the claims; UnsupportedFormatError for a stored matrix that rotates inputs of many layers."""
    for name in storage.keys():  # noqa: SIM118
        if name.rpartition(".")[2].startswith(SHARED_ROTATION):
            reason = f"{name} changes the result of layers"
            raise UnsupportedFormatError("quark with rotated inputs", reason, remedy=ROTATED)
    return claims


def _formats(fmt: Format | None) -> tuple[ConfiguredFormat, ...] | UnsupportedFormatError:
    """Formats of a rule: none for plain modules."""
    if fmt is None:
        return ()
    return (fmt,) if isinstance(fmt, ConfiguredFormat) else fmt


def _format(source: configs.FoundConfig, reorder: bool, key: str, layer: _Layer | None) -> Format | None:
    """Format of an entry; None for plain layers, the error for an unsupported type."""
    stated = layer.weight if layer else None
    if stated is None:
        return None
    if isinstance(stated, list):
        return _unsupported(source, "several types of one weight", f"{key}.weight")
    if not isinstance(stated, dict):
        raise source.error(f"{key}.weight", "an object", configs.value_text(stated))
    if layer and layer.bias is not None:
        return _unsupported(source, "quantized biases", f"{key}.bias")
    place = configs.FoundConfig(source.file, source.key(f"{key}.weight"), stated)
    weight = configs.validate(_Tensor, place)
    fmt = _of_type(weight, reorder) if weight.has_usual_axis else None
    if fmt is None:
        variant = f"dtype {weight.dtype:.20}, qscheme {weight.qscheme or 'none':.20}"
        variant += "" if weight.has_usual_axis else f", ch_axis {weight.ch_axis}"
        return _unsupported(source, variant, f"{key}.weight")
    size = weight.group_size if weight.qscheme == "per_group" else None
    return replace(fmt, claims=LayerClaims(BITS[weight.dtype], size, source=key))


def _of_type(weight: _Tensor, reorder: bool) -> ConfiguredFormat | None:
    """Format of a type of weights; None if it is not read."""
    dtype, scheme, size, block = weight.dtype, weight.qscheme, weight.group_size, weight.block_size
    in_32 = scheme == "per_group" and size == GROUP and weight.scale_format == POWERS
    if dtype in ("fp8_e4m3", "fp8_e5m2"):
        if scheme == "per_block" and block is not None:
            return ConfiguredFormat(Fp8Weight, Fp8Config("block", (block[0], block[1])))
        if scheme in ("per_tensor", "per_channel"):
            return ConfiguredFormat(Fp8Weight, Fp8Config("tensor" if scheme == "per_tensor" else "channel"))
        return ConfiguredFormat(MXFP8Weight, MXFP8Config()) if in_32 and dtype == "fp8_e4m3" else None
    if dtype == "int8" and scheme in ("per_tensor", "per_channel"):
        config = CTIntConfig(None if scheme == "per_tensor" else (1, -1), zeros="checked")
        return ConfiguredFormat(CTIntWeight, config)
    if dtype in ("int4", "uint4") and scheme == "per_group" and size and weight.zero_point_type != "float32":
        asymmetric = weight.symmetric is not True
        words = QuarkInt4Config(size, dtype == "int4", reorder, zero_points=asymmetric)
        return ConfiguredFormat(QuarkInt4Weight, words)
    if dtype == "fp4" and in_32:
        return ConfiguredFormat(CTMXFP4Weight, MXFP4)
    if dtype in ("fp6_e2m3", "fp6_e3m2") and in_32:
        element: Literal["e2m3", "e3m2"] = "e2m3" if dtype == "fp6_e2m3" else "e3m2"
        return ConfiguredFormat(QuarkMXFP6Weight, QuarkMXFP6Config(element))
    return None


def _name(layer: _Layer | None) -> str:
    weight = layer.weight if layer else None
    dtype = weight.get("dtype") if isinstance(weight, dict) else None
    return dtype[:40] if isinstance(dtype, str) else "quark"


def _notes(source: configs.FoundConfig, layers: Sequence[_Layer | None]) -> Iterator[str]:
    """Yield a note if inputs are quantized."""
    if any(layer and layer.input_tensors for layer in layers):
        yield f"{source.file} quantizes inputs of layers; linears of qload take them as they are"


def _unsupported(source: configs.FoundConfig, variant: str, key: str) -> UnsupportedFormatError:
    reason = f"the {key} of {source.file} is not supported"
    return UnsupportedFormatError(f"quark ({variant:.80})", reason, VARIANTS, REMEDY)


METHODS = (
    configs.Method(
        names=("quark",),
        read=read_quark,
        formats=(Fp8Weight, CTIntWeight, QuarkInt4Weight, CTMXFP4Weight, QuarkMXFP6Weight, MXFP8Weight),
        variants=VARIANTS,
        exclusion_key="exclude",
        complete=check_rotation,
    ),
)
