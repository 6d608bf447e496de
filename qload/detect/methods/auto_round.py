"""`quant_method: auto-round`: tensors of several other methods, by `packing_format`.

    auto_round:auto_gptq              GPTQ, zero points minus 1, no index
    auto_round:gptqmodel, auto_round  GPTQ, plain zero points, with an index
    auto_round:auto_awq               AWQ GEMM
    auto_round:llm_compressor         compressed-tensors; `data_type` and `act_bits` select the format
    auto_round:fp8_static             FP8, one scale per output and one for activations
    auto_round:fp8                    FP8, in the blocks of group_size
    none, and data_type fp            FP8, weights only; group_size 0: one scale, -1: one scale per output
    auto_round:fake                   plain weights

Versions up to 0.4.7 write a `backend` and no `packing_format`: `auto_round:exllamav2` stores plain zero
points, `auto_round:gptq:exllamav2` zero points minus 1.

`extra_config` maps names, and patterns for `re.search`, to the settings of single modules; modules with 16
bits are plain. Names take precedence over patterns. Source: auto-round 0.16.1 and its files.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from qload import configs
from qload.configs.matching import REGEX_PREFIX
from qload.detect.methods import ct_schemes
from qload.errors import UnsupportedFormatError
from qload.formats import (
    AWQConfig,
    AWQWeight,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackWeight,
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
)
from qload.layouts import STORED_MINUS_ONE, Stored, ZeroPoints
from qload.loader import ConfiguredFormat
from qload.spec import ActivationScheme, LayerClaims

AUTO_ROUND_VARIANTS = ("auto-round (auto_gptq, gptqmodel, auto_awq, llm_compressor, fp8, fp8_static, fake)",)
GPTQ_ZERO_POINTS: Mapping[str, ZeroPoints] = {
    "auto": STORED_MINUS_ONE,  # as auto-round reads it
    "auto_gptq": STORED_MINUS_ONE,
    "gptq": STORED_MINUS_ONE,
    "gptqmodel": Stored(),
    "auto_round": Stored(),
}
DEFAULT_PACKING = "auto_gptq"
# Kernels after `auto_round:` in versions up to 0.4.7: plain zero points. With `auto_round:gptq:` before the
# kernel, auto-gptq's packer stores them minus one.
PLAIN_ZERO_BACKENDS = ("exllamav2", "exllama", "tritonv2", "triton", "cuda")
FAKE_PACKING = "fake"
FP8_PACKINGS = ("fp8", "fp8_static")
PACKING_BITS = {
    **dict.fromkeys(GPTQ_ZERO_POINTS, (2, 3, 4, 8)),
    "auto_awq": (4, 8),
    "awq": (4, 8),
    **dict.fromkeys(FP8_PACKINGS, (8,)),
}
OTHER_PROGRAMS = {  # packing_format or data_type -> a program that reads it
    "gguf": "llama.cpp runs the GGUF file that AutoRound also writes",
    "mlx": "mlx-lm loads it, and its convert with --dequantize writes plain safetensors",
    "svdquant": "Nunchaku, or diffusers with it, loads it",
    "mx_int": "auto-round loads it: its codes are sign and magnitude, in bytes that look like MXFP4",
}
FLOAT8_BITS = 8
MIN_PLAIN_BITS = 16  # modules with this many bits are not quantized
STATIC_FP8 = ActivationScheme("float", 8, False, "tensor", scale="input_scale")
NVFP4 = ActivationScheme(
    "float", 4, "local", "tensor_group", 16, scale="input_global_scale", scale_type="e4m3"
)
REGEX_CHARACTERS = frozenset("*+?^$()[]{}|\\")  # a key that has one is a pattern
# `data_type` without its bits -> format and scheme of compressed-tensors.
CT_SCHEMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "nv_fp": ("nvfp4-pack-quantized", {"type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mx_fp": ("mxfp{bits}-pack-quantized", {"type": "float", "strategy": "group", "group_size": 32}),
    "fp": ("float-quantized", {"type": "float"}),
    "int": ("pack-quantized", {"type": "int"}),
}


# A setting of compressed-tensors' schemes -> the key of AutoRound that states it.
SETTING_KEYS: Mapping[str, str] = {
    "": "data_type",
    "type": "data_type",
    "num_bits": "bits",
    "symmetric": "sym",
    **dict.fromkeys(("strategy", "group_size", "block_structure"), "group_size"),
}
# Inputs of a group, or [outputs, inputs] of a block.
Size = Annotated[int, Field(ge=-1, le=configs.MAX_LAYER_SIZE)] | configs.Block


class _ModuleSettings(configs.Entry):
    """Settings of a module; None for the setting of the whole config."""

    bits: Annotated[int, Field(ge=1)] | None = None
    group_size: Size | None = None
    packing_format: configs.Name = None
    backend: configs.Name = None
    sym: bool | None = None
    data_type: configs.Name = None
    act_bits: int | None = Field(default=None, ge=1, le=64)
    act_data_type: configs.Name = None
    act_group_size: Size | None = None
    act_sym: bool | None = None
    act_dynamic: bool | None = None


class _AutoRound(configs.Section, _ModuleSettings):
    bits: Annotated[int, Field(ge=1)]
    group_size: Size
    rotation_config: Any = None
    extra_config: Annotated[dict[str, _ModuleSettings] | None, BeforeValidator(configs.none_for_false)] = None


def read_auto_round(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of all modules, and of the modules in `extra_config`."""
    section = configs.validate(_AutoRound, source)
    if section.rotation_config:
        reason = f"the rotation_config of {source.file} rotates weights, and qload does not rotate them back"
        raise UnsupportedFormatError(
            "auto-round with rotations", reason, AUTO_ROUND_VARIANTS, "auto-round loads it"
        )
    base = _ModuleSettings(**{key: getattr(section, key) for key in _ModuleSettings.model_fields})
    base_formats = _formats(source, base, "", {*source.values})
    rules: dict[str, tuple[ConfiguredFormat, ...] | UnsupportedFormatError] = {}
    for name, rule in sorted((section.extra_config or {}).items(), key=lambda item: _is_pattern(item[0])):
        merged = base.model_copy(update=rule.model_dump(exclude_none=True))
        entry = REGEX_PREFIX * _is_pattern(name) + name
        rules[entry] = ()
        if (merged.bits or 0) < MIN_PLAIN_BITS:
            rules[entry] = _formats(source, merged, f"extra_config.{name}", rule.model_fields_set)
    if isinstance(base_formats, UnsupportedFormatError):
        raise base_formats
    packing = _packing(source, base)
    patterns = configs.Patterns(source, "extra_config", anywhere=True)
    rule_formats = [fmt for formats in rules.values() if isinstance(formats, tuple) for fmt in formats]
    note = f"{source.file} says packing_format {FAKE_PACKING}: weights were quantized and are stored plain"
    return section.claims(
        source,
        "auto-round",
        packing,
        *dict.fromkeys([*base_formats, *rule_formats]),
        bits=section.bits,
        group_size=section.group_size if isinstance(section.group_size, int) else None,
        sym=section.sym,
        rules=configs.override_rules(rules, base_formats, section.exclusions(), patterns),
        notes=(note,) if packing == FAKE_PACKING else (),
    )


def _packing(source: configs.FoundConfig, rule: _ModuleSettings) -> str:
    """Packing of the modules with these settings: `packing_format`, else `backend`.

    UnsupportedFormatError for a backend with an unknown convention of zero points.
    """
    stated = rule.packing_format or rule.backend
    if stated in (None, "auto", "auto_round:auto"):
        return DEFAULT_PACKING
    name = stated.removeprefix("auto_round:").partition(":")[0]
    if stated.startswith("auto_round:") and name in PLAIN_ZERO_BACKENDS:
        return "auto_round"
    if rule.packing_format is None and name not in PACKING_BITS:
        reason = (
            f"the backend of {source.file} is not supported: without a packing_format nothing else says "
            "whether its zero points are stored minus one"
        )
        remedy = "write the model again with auto-round 0.5 or later, or set packing_format if it is known"
        raise UnsupportedFormatError(
            f"auto-round (backend {stated:.40})", reason, AUTO_ROUND_VARIANTS, remedy
        )
    return name


def _formats(
    source: configs.FoundConfig, rule: _ModuleSettings, entry: str, stated: Collection[str]
) -> tuple[ConfiguredFormat, ...] | UnsupportedFormatError:
    """Formats of the modules with these settings, empty for plain ones; an error for an unsupported format.

    `source`: entry of the config with these settings. `stated`: keys of the entry; the values of all other
    keys are those of the whole config.
    """

    def key(name: str) -> str:
        return f"{entry:.99}.{name}" if entry and name in stated else name

    try:
        packing = _packing(source, rule)
        if packing == FAKE_PACKING:
            return ()
        fmt = _format(source, packing, rule, key)
    except UnsupportedFormatError as error:
        return error
    convention = "backend" if rule.packing_format is None and rule.backend else "packing_format"
    size = rule.group_size if isinstance(rule.group_size, int) else None
    return (replace(fmt, claims=LayerClaims(rule.bits, size, rule.sym, None, entry, convention)),)


def _is_pattern(key: str) -> bool:
    return not REGEX_CHARACTERS.isdisjoint(key)


def _format(
    source: configs.FoundConfig, packing: str, rule: _ModuleSettings, key: Callable[[str], str]
) -> ConfiguredFormat:
    """Format of a packing with these settings; `key`: path of a setting in the config, for errors."""
    bits, size = rule.bits or 0, -1 if rule.group_size is None else rule.group_size
    data_type = rule.data_type or "int"
    family = next((family for family in CT_SCHEMES if data_type.startswith(family)), None)
    packs_words = packing in GPTQ_ZERO_POINTS or packing in ("auto_awq", "awq")
    unread = next(
        (family for family in OTHER_PROGRAMS if packing.startswith(family) or data_type.startswith(family)),
        None,
    )
    if unread or family is None or not (packs_words or packing in (*FP8_PACKINGS, "llm_compressor")):
        name = f"auto-round ({packing:.40}, {data_type:.40})"
        reason = f"the data_type or packing_format of {source.file} is not supported"
        raise UnsupportedFormatError(name, reason, AUTO_ROUND_VARIANTS, OTHER_PROGRAMS.get(unread or "", ""))
    float8 = packing in FP8_PACKINGS or (packs_words and family == "fp" and bits == FLOAT8_BITS)
    grouped = isinstance(size, int) and (size != 0 or not packs_words)
    allowed_bits = PACKING_BITS.get(packing, (bits,))
    if bits not in allowed_bits or not (grouped or float8 or packing == "llm_compressor"):
        expected = (
            f"bits {' or '.join(map(str, allowed_bits))}, and a group size of -1 or at least 1, for {packing}"
        )
        wrong = "group_size" if bits in allowed_bits else "bits"
        raise source.error(key(wrong), expected, f"bits {bits}, group size {size}")
    if float8:
        return _fp8_format(packing, rule, size)
    if family in ("nv_fp", "mx_fp") or packing == "llm_compressor" or isinstance(size, list):
        return _ct_format(source, rule, family, bits, size, key)
    if packing in GPTQ_ZERO_POINTS:
        zeros = GPTQ_ZERO_POINTS[packing]
        return ConfiguredFormat(GPTQWeight, GPTQConfig(bits, size, zeros, desc_act=False, indexed=None))
    return ConfiguredFormat(AWQWeight, AWQConfig(size, bits))


def _fp8_format(packing: str, rule: _ModuleSettings, size: int | list[int]) -> ConfiguredFormat:
    """FP8 with one scale per tensor, output, group of inputs, or block."""
    if isinstance(size, list) or size > 0:
        block = (size[0], size[1]) if isinstance(size, list) else (1, size)
        return ConfiguredFormat(Fp8Weight, Fp8Config("block", block), _activations(rule))
    if packing == "fp8_static":
        return ConfiguredFormat(Fp8Weight, Fp8Config(), STATIC_FP8)
    return ConfiguredFormat(Fp8Weight, Fp8Config("tensor" if size == 0 else "channel"), _activations(rule))


def _activations(rule: _ModuleSettings) -> ActivationScheme | None:
    """Activation scheme of these settings; stored scales have the names of compressed-tensors."""
    bits, data_type = rule.act_bits or MIN_PLAIN_BITS, rule.act_data_type or rule.data_type or "int"
    if bits >= MIN_PLAIN_BITS:
        return None
    if data_type.startswith("nv_fp"):
        return NVFP4
    if data_type.startswith("mx_fp"):
        return ActivationScheme("float", bits, True, "group", 32, scale_type="e8m0")
    number: Literal["float", "int"] = "float" if data_type.startswith("fp") else "int"
    if rule.act_dynamic is False:
        return ActivationScheme(number, bits, False, "tensor", scale=STATIC_FP8.scale)
    size = rule.act_group_size
    if isinstance(size, list):
        size = size[1]
    strategy = None if size is None else {-1: "token", 0: "tensor"}.get(size, "group")
    group = size if strategy == "group" else None
    return ActivationScheme(number, bits, True, strategy, group, rule.act_sym is not False)


def _ct_format(
    source: configs.FoundConfig,
    rule: _ModuleSettings,
    family: str,
    bits: int,
    size: int | list[int],
    key: Callable[[str], str],
) -> ConfiguredFormat:
    """Format by an equivalent config of compressed-tensors; errors name the keys of AutoRound."""
    stated, scheme_settings = CT_SCHEMES[family]
    if family == "int" and (rule.act_bits or MIN_PLAIN_BITS) < MIN_PLAIN_BITS:
        stated = "int-quantized"
    if family == "mx_fp" and bits == 8:
        stated = "mxfp8-quantized"
    shared: dict[str, Any] = {"strategy": "block", "block_structure": size}
    if isinstance(size, int):
        shared = {"strategy": {0: "tensor", -1: "channel"}.get(size, "group"), "group_size": size}
    scheme = ct_schemes.Scheme.model_validate(
        {"num_bits": bits, "symmetric": rule.sym is not False, **shared, **scheme_settings}
    )
    fmt = ct_schemes.weight_format(
        source,
        lambda name: key(SETTING_KEYS[name]),
        stated.format(bits=bits),
        scheme,
        static=False,
        dense=True,
    )
    return replace(fmt, activations=_activations(rule))


_ROTATED = configs.IgnoredKey("rotates the inputs of layers, and qload does not", refused=True)
_SCALES = configs.IgnoredKey("quantizes the scales, and qload does not dequantize them", refused=True)
_CACHE = configs.IgnoredKey("configures the key/value cache and attention, which is left to the engine")
SCHEME_WEIGHTS = (Fp8Weight, CTPackWeight, CTIntWeight, CTNVFP4Weight, CTMXFP4Weight)
METHODS = (
    configs.Method(
        names=("auto-round",),
        read=read_auto_round,
        formats=(GPTQWeight, AWQWeight, *SCHEME_WEIGHTS),
        variants=AUTO_ROUND_VARIANTS,
        activation_key="act_bits",
        activation_formats=SCHEME_WEIGHTS,
        exclusion_key="16 bits in extra_config",
        module_key="extra_config",
        ignored={
            "rotation_config": _ROTATED,
            "hadamard_config": _ROTATED,
            "transform_config": _ROTATED,
            "super_bits": _SCALES,
            "super_group_size": _SCALES,
            "static_kv_dtype": _CACHE,
            "static_attention_dtype": _CACHE,
        },
    ),
)
