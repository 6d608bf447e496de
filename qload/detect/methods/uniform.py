"""Methods with one format for all quantized layers.

awq                      AWQ, GEMM layout
bitsandbytes             NF4, FP4 or int8; also configs older than the key `quant_method`
eetq                     int8
exl2                     EXL2
fp8, fbgemm_fp8          FP8; also GPTQModel's dialect with dividing scales
mxfp8                    MXFP8
mxfp4                    gpt-oss: quantized experts, all other layers plain
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import AliasChoices, Field

from qload.detect.files import FoundConfig
from qload.detect.matching import GlobExclusions, check_pattern_lengths
from qload.detect.validation import Claims, Name, NameList, Section, agree, check_group_size, one_of, validate
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats import (
    AWQConfig,
    AWQWeight,
    BNB4Config,
    BNBConfig,
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTMXFP4Weight,
    EETQConfig,
    EETQWeight,
    Exl2Config,
    Exl2Weight,
    Fp8Config,
    Fp8Weight,
    MXFP4Config,
    MXFP4ExpertsWeight,
    MXFP8Config,
    MXFP8Weight,
)
from qload.formats.fp8 import Per
from qload.formats.mx import GROUP
from qload.loader import ConfiguredFormat
from qload.spec import ActivationScheme

AWQ_VARIANTS = ("awq (version gemm)",)
AWQ_LAYOUTS = ("gemm",)


class _AWQ(Section):
    bits: Annotated[int, one_of(4, 8)] = Field(validation_alias=AliasChoices("bits", "w_bit"))
    group_size: int = Field(ge=-1, validation_alias=AliasChoices("group_size", "q_group_size"))
    zero_point: bool | None = None
    version: Name = None
    checkpoint_format: Name = None
    format: Name = None
    pack_dtype: Literal["int32"] | None = None
    backend: str | None = None


def read_awq(source: FoundConfig) -> Claims:
    """Read the claims of `quant_method: awq`; only the GEMM layout is supported."""
    section = validate(_AWQ, source)
    agree(source, "bits", "w_bit")
    agree(source, "group_size", "q_group_size")
    variants = [name.lower() for name in (section.version, section.checkpoint_format, section.format) if name]
    for variant in variants or ["gemm"]:
        if variant not in AWQ_LAYOUTS:
            raise UnsupportedFormatError(
                f"awq_{variant}", f"the version of {source.file} is not supported", AWQ_VARIANTS
            )
    if section.backend == "llm-awq":
        raise UnsupportedFormatError(
            "llm-awq", f"the backend of {source.file} packs in another order", AWQ_VARIANTS
        )
    check_group_size(source, section.group_size, "group_size", "q_group_size")
    sym = None if section.zero_point is None else not section.zero_point
    config = AWQConfig(section.group_size, section.bits, zero_point=sym is not True)
    fmt = ConfiguredFormat(AWQWeight, config)
    return section.claims(
        source, "awq", "gemm", fmt, bits=section.bits, group_size=section.group_size, sym=sym
    )


BNB_VARIANTS = ("bitsandbytes (load_in_4bit, load_in_8bit)",)
BNB_FLAGS = ("load_in_4bit", "load_in_8bit")


class _BNB(Section):
    load_in_4bit: bool | None = None
    load_in_8bit: bool | None = None
    bnb_4bit_quant_type: Literal["nf4", "fp4"] | None = None
    bnb_4bit_use_double_quant: bool | None = None
    bnb_4bit_compute_dtype: Annotated[str, Field(min_length=1)] | None = None
    bnb_4bit_quant_storage: Annotated[str, Field(min_length=1)] | None = None
    llm_int8_threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    llm_int8_skip_modules: NameList | None = None
    llm_int8_enable_fp32_cpu_offload: bool | None = None
    llm_int8_has_fp16_weight: bool | None = None

    lists = ("llm_int8_skip_modules", "modules_to_not_convert")


def read_bitsandbytes(source: FoundConfig) -> Claims:
    """Read the claims of bitsandbytes; the state of a 4-bit layer tells NF4 from FP4."""
    section = validate(_BNB, source)
    for flag in BNB_FLAGS:
        agree(source, flag, f"_{flag}")
    if bool(section.load_in_4bit) == bool(section.load_in_8bit):
        key, got = source.key("load_in_4bit"), "both" if section.load_in_4bit else "neither"
        raise ConfigError(source.file, key, "true, or load_in_8bit true, not both", got)
    if section.load_in_8bit:
        return section.claims(
            source, "bitsandbytes", "int8", ConfiguredFormat(BNBWeight, BNBConfig()), bits=8
        )
    double_quant = section.bnb_4bit_use_double_quant
    nf4 = ConfiguredFormat(BNBNF4Weight, BNB4Config("nf4", double_quant=double_quant))
    fp4 = ConfiguredFormat(BNBFP4Weight, BNB4Config("fp4", double_quant=double_quant))
    quant_type = section.bnb_4bit_quant_type or "fp4"
    formats = (nf4, fp4) if quant_type == "nf4" else (fp4, nf4)  # the claimed one first
    return section.claims(source, "bitsandbytes", quant_type, *formats, bits=4)


EETQ_VARIANTS = ("eetq (weights int8)",)
EETQ_WEIGHTS = "int8"


class _EETQ(Section):
    weights: Name = None


def read_eetq(source: FoundConfig) -> Claims:
    """Read the claims of `quant_method: eetq`; only 8-bit weights are supported."""
    section = validate(_EETQ, source)
    weights = section.weights or EETQ_WEIGHTS
    if weights != EETQ_WEIGHTS:
        raise UnsupportedFormatError(
            f"eetq_{weights:.40}", f"the weights of {source.file} are not supported", EETQ_VARIANTS
        )
    fmt = ConfiguredFormat(EETQWeight, EETQConfig())
    return section.claims(source, "eetq", weights, fmt, bits=8, group_size=-1, sym=True)


EXL2_VARIANTS = ("exl2",)


class _EXL2(Section):
    version: Name = None
    bits: Annotated[float, Field(gt=0, le=16, allow_inf_nan=False)] | None = None  # mean over all layers
    head_bits: Annotated[int, Field(ge=2, le=16)] | None = None
    calibration: dict[str, Any] | None = None


def read_exl2(source: FoundConfig) -> Claims:
    """Read the claims of `quant_method: exl2`: none about layers, whose tensors tell the bit widths."""
    section = validate(_EXL2, source)
    return section.claims(source, "exl2", "exl2", ConfiguredFormat(Exl2Weight, Exl2Config()))


FP8_VARIANTS = ("fp8 (multiplying, or weight_scale_semantics inverse)", "fbgemm_fp8", "mxfp8")
FP8_DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "float8_e5m2": torch.float8_e5m2,
}
MX_BLOCK = [1, GROUP]
UNUSED_SCALE = "weight_scale_inv"  # transformers also stores it for weights that are not in blocks
FP8_GRANULARITIES: dict[str, Per] = {"tensor": "tensor", "row": "channel", "block": "block"}

MAX_LAYER_SIZE = (1 << 31) - 1  # inputs or outputs
Block = Annotated[list[Annotated[int, Field(ge=1, le=MAX_LAYER_SIZE)]], Field(min_length=2, max_length=2)]


class _FP8(Section):
    activation_scheme: Literal["dynamic", "static"] | None = None
    weight_block_size: Block | None = None
    fmt: Literal["e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"] | None = None
    scale_fmt: Literal["float", "ue8m0"] | None = None
    bits: Annotated[int, one_of(8)] | None = None
    format: Literal["fp8"] | None = None
    weight_scale_method: Literal["tensor", "row", "block"] | None = None
    weight_scale_semantics: Literal["inverse"] | None = None
    ignored_layers: NameList | None = None

    lists = ("modules_to_not_convert", "ignored_layers")


class _MXFP8(Section):
    activation_scheme: Literal["dynamic"] | None = None
    weight_block_size: Block | None = None
    scale_fmt: Literal["ue8m0"] | None = None
    ignored_layers: NameList | None = None

    lists = ("modules_to_not_convert", "ignored_layers")


class _FBGEMM(Section):
    activation_scale_ub: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def read_fp8(source: FoundConfig) -> Claims:
    """Read the claims of FP8; without a claim the shape of the scale tells its granularity."""
    section: Section
    if agree(source, "quant_method", "method") == "fbgemm_fp8":
        section = limited = validate(_FBGEMM, source)
        limit = limited.activation_scale_ub
        config = Fp8Config("channel", activation_scale_ub=limit)
        tokens = ActivationScheme("float", 8, True, "token", upper_bound=limit, owner="fbgemm")
        fmt = ConfiguredFormat(Fp8Weight, config, tokens)
    else:
        section = stated = validate(_FP8, source)
        config = _fp8_config(source, stated)
        fmt = ConfiguredFormat(Fp8Weight, config, _fp8_activations(stated))
    name = "fp8_inverse" if config.divide else "fp8"
    return section.claims(source, "fp8", name, fmt, bits=8, sym=True, unused=(UNUSED_SCALE,))


def read_mxfp8(source: FoundConfig) -> Claims:
    """Read the claims of MXFP8 as written by transformers and SGLang: 32 inputs share a power of two."""
    section = validate(_MXFP8, source)
    block = section.weight_block_size
    if block not in (None, MX_BLOCK):
        reason = f"the weight_block_size of {source.file} is not supported"
        raise UnsupportedFormatError(f"mxfp8 in blocks of {block}", reason, FP8_VARIANTS)
    inputs = ActivationScheme("float", 8, True, "group", GROUP, scale_type="e8m0", owner="transformers")
    fmt = ConfiguredFormat(MXFP8Weight, MXFP8Config(), inputs if section.activation_scheme else None)
    return section.claims(source, "mxfp8", "mxfp8", fmt, bits=8, group_size=GROUP, sym=True)


def _fp8_activations(section: _FP8) -> ActivationScheme | None:
    """Activation scheme of FP8.

    A stored scale applies to the tensor. A dynamic scale applies to a block's number of inputs for weights in
    blocks, and to a token for other weights, as in transformers 5.23.0 and, with CUTLASS, in vLLM 0.11.0.
    With powers of two as scales of blocks, the scales of inputs are powers of two.
    """
    if section.activation_scheme is None:
        return None
    if section.activation_scheme == "static":
        return ActivationScheme("float", 8, False, "tensor", scale="input_scale", owner="transformers")
    if section.weight_block_size is None:
        return ActivationScheme("float", 8, True, "token", owner="transformers")
    group_size, powers = section.weight_block_size[1], section.scale_fmt == "ue8m0"
    dynamic = ActivationScheme("float", 8, True, "group", group_size, owner="transformers")
    return replace(dynamic, scale_type="e8m0") if powers else dynamic


def _fp8_config(source: FoundConfig, section: _FP8) -> Fp8Config:
    method, size = section.weight_scale_method, section.weight_block_size
    if method and section.weight_scale_semantics is None:
        # GPTQModel alone states a method, and its scales divide: without the semantics it is ambiguous.
        key = source.key("weight_scale_semantics")
        raise ConfigError(source.file, key, "'inverse', with weight_scale_method", "nothing")
    if method and (method == "block") != (size is not None):
        expected = "[outputs, inputs]" if method == "block" else "nothing"
        key = source.key("weight_block_size")
        raise ConfigError(source.file, key, f"{expected}, with weight_scale_method {method}", str(size))
    return Fp8Config(
        FP8_GRANULARITIES[method] if method else "block" if size else None,
        (size[0], size[1]) if size else None,
        divide=section.weight_scale_semantics == "inverse",
        input_scale=True if section.activation_scheme == "static" else None,
        dtype=FP8_DTYPES[section.fmt] if section.fmt else None,
    )


MXFP4_VARIANTS = ("mxfp4 (experts)",)


def read_mxfp4(source: FoundConfig) -> Claims:
    """Read the claims of gpt-oss, with shell patterns in its list of excluded modules."""
    section = validate(Section, source)
    check_pattern_lengths(source, "modules_to_not_convert", section.modules_to_not_convert or ())
    formats = [
        ConfiguredFormat(weight_type, MXFP4Config()) for weight_type in (MXFP4ExpertsWeight, CTMXFP4Weight)
    ]
    exclusions = section.exclusions(GlobExclusions)
    return section.claims(
        source, "mxfp4", "mxfp4", *formats, bits=4, group_size=32, sym=True, exclusions=exclusions
    )
