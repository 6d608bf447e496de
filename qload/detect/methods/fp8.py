"""`quant_method: fp8`, `fbgemm_fp8` and `mxfp8`, and GPTQModel's dialect of fp8 with dividing scales."""

from typing import Annotated, Literal

import torch
from pydantic import Field

from qload.detect.files import FoundConfig
from qload.detect.validation import Claims, Section, agree, one_of, validate
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats import Fp8Config, Fp8Weight, MXFP8Config, MXFP8Weight
from qload.formats.fp8 import Per
from qload.formats.mx import GROUP
from qload.loader import ConfiguredFormat
from qload.spec import ActivationScheme

KNOWN = ("fp8 (multiplying, or weight_scale_semantics inverse)", "fbgemm_fp8", "mxfp8")
TYPES = {
    "e4m3": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "float8_e5m2": torch.float8_e5m2,
}
MX_BLOCK = [1, GROUP]
UNUSED = "weight_scale_inv"  # which transformers stores beside weights that its blocks do not divide, too
PER: dict[str, Per] = {"tensor": "tensor", "row": "channel", "block": "block"}

MOST = (1 << 31) - 1  # no layer has more inputs or outputs
Block = Annotated[list[Annotated[int, Field(ge=1, le=MOST)]], Field(min_length=2, max_length=2)]


class _FP8(Section):
    activation_scheme: Literal["dynamic", "static"] | None = None
    weight_block_size: Block | None = None
    fmt: Literal["e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"] | None = None
    scale_fmt: Literal["float", "ue8m0"] | None = None
    bits: Annotated[int, one_of(8)] | None = None
    format: Literal["fp8"] | None = None
    weight_scale_method: Literal["tensor", "row", "block"] | None = None
    weight_scale_semantics: Literal["inverse"] | None = None
    ignored_layers: list[Annotated[str, Field(min_length=1)]] | None = None

    lists = ("modules_to_not_convert", "ignored_layers")


class _MXFP8(Section):
    activation_scheme: Literal["dynamic"] | None = None
    weight_block_size: Block | None = None
    scale_fmt: Literal["ue8m0"] | None = None
    ignored_layers: list[Annotated[str, Field(min_length=1)]] | None = None

    lists = ("modules_to_not_convert", "ignored_layers")


class _FBGEMM(Section):
    activation_scale_ub: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def read(found: FoundConfig) -> Claims:
    """The claims of weights in FP8; what shares a scale, where the config is silent, its shape tells."""
    section: Section
    if agree(found, "quant_method", "method") == "fbgemm_fp8":
        section = limited = validate(_FBGEMM, found)
        limit = limited.activation_scale_ub
        config = Fp8Config("channel", activation_scale_ub=limit)
        inputs: ActivationScheme | None = ActivationScheme(
            "float", 8, True, "token", upper_bound=limit, owner="fbgemm"
        )
    else:
        section = stated = validate(_FP8, found)
        config, inputs = _config(found, stated), _inputs(stated)
    return Claims(
        method="fp8",
        format="fp8_inverse" if config.divide else "fp8",
        bits=8,
        group_size=None,
        sym=True,
        desc_act=None,
        file=found.file,
        section=found.section,
        exclusions=section.exclusions(),
        formats=(ConfiguredFormat(Fp8Weight, config, inputs),),
        unused=(UNUSED,),
    )


def read_mxfp8(found: FoundConfig) -> Claims:
    """Read the claims of MXFP8 as transformers and SGLang write it: 32 inputs share a power of two."""
    read = validate(_MXFP8, found)
    block = read.weight_block_size
    if block not in (None, MX_BLOCK):
        reason = f"the weight_block_size of {found.file} has no reader"
        raise UnsupportedFormatError(f"mxfp8 in blocks of {block}", reason, KNOWN)
    inputs = ActivationScheme("float", 8, True, "group", GROUP, scale_type="e8m0", owner="transformers")
    activations = inputs if read.activation_scheme else None
    return Claims(
        method="mxfp8",
        format="mxfp8",
        bits=8,
        group_size=GROUP,
        sym=True,
        desc_act=None,
        file=found.file,
        section=found.section,
        exclusions=read.exclusions(),
        formats=(ConfiguredFormat(MXFP8Weight, MXFP8Config(), activations),),
    )


def _inputs(read: _FP8) -> ActivationScheme | None:
    """Scales that are stored are of tensors. Those that are found are, beside blocks, of as many inputs.

    Beside other weights they are of tokens, as transformers 5.23.0 and, with CUTLASS, vLLM 0.11.0 find them.
    Blocks whose scales are powers of two have inputs with such scales.
    """
    if read.activation_scheme is None:
        return None
    if read.activation_scheme == "static":
        return ActivationScheme("float", 8, False, "tensor", scale="input_scale", owner="transformers")
    if read.weight_block_size is None:
        return ActivationScheme("float", 8, True, "token", owner="transformers")
    return ActivationScheme(
        "float",
        8,
        True,
        "group",
        read.weight_block_size[1],
        scale_type="e8m0" if read.scale_fmt == "ue8m0" else "float32",
        owner="transformers",
    )


def _config(found: FoundConfig, read: _FP8) -> Fp8Config:
    method, size = read.weight_scale_method, read.weight_block_size
    if method and read.weight_scale_semantics is None:
        # Only GPTQModel says by which method, and its scales divide: unsaid, there are two readings.
        key = found.key("weight_scale_semantics")
        raise ConfigError(found.file, key, "'inverse', beside weight_scale_method", "nothing")
    if method and (method == "block") != (size is not None):
        expected = "[outputs, inputs]" if method == "block" else "nothing"
        key = found.key("weight_block_size")
        raise ConfigError(found.file, key, f"{expected}, beside weight_scale_method {method}", str(size))
    return Fp8Config(
        PER[method] if method else "block" if size else None,
        (size[0], size[1]) if size else None,
        divide=read.weight_scale_semantics == "inverse",
        input_scale=True if read.activation_scheme == "static" else None,
        dtype=TYPES[read.fmt] if read.fmt else None,
    )
