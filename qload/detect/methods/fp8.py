"""FP8: `fp8`, also GPTQModel's dialect, `fbgemm_fp8`, and the params.json of Mistral.

Without a claim the shape of a scale tells its granularity. Source: transformers 5.23.0, vLLM 0.11.0,
sglang 0.5.23 and gptqmodel 7.7.0.
"""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from qload import configs, dtypes
from qload.configs.claims import NEUTRAL_VALUES
from qload.errors import ConfigError
from qload.formats import Fp8Config, Fp8Weight
from qload.formats.fp8 import Per
from qload.loader import ConfiguredFormat
from qload.spec import ActivationScheme

FP8_DTYPES = {
    "e4m3": dtypes.float8_e4m3fn,
    "float8_e4m3fn": dtypes.float8_e4m3fn,
    "e5m2": dtypes.float8_e5m2,
    "float8_e5m2": dtypes.float8_e5m2,
}
UNUSED_SCALE = "weight_scale_inv"  # transformers also stores it for weights that are not in blocks
FP8_GRANULARITIES: dict[str, Per] = {"tensor": "tensor", "row": "channel", "block": "block"}


class _FP8(configs.Section):
    activation_scheme: Literal["dynamic", "static"] | None = None
    weight_block_size: configs.Block | None = None
    fmt: Literal["e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"] | None = None
    scale_fmt: Literal["float", "ue8m0"] | None = None
    bits: Annotated[int, configs.one_of(8)] | None = None
    format: Literal["fp8"] | None = None
    weight_scale_method: Literal["tensor", "row", "block"] | None = None
    weight_scale_semantics: Literal["inverse"] | None = None
    ignored_layers: configs.NameList | None = None

    lists = ("modules_to_not_convert", "ignored_layers")


class _FBGEMM(configs.Section):
    activation_scale_ub: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def read_fp8(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of FP8; without a claim the shape of the scale tells its granularity."""
    section: configs.Section
    if configs.agree(source, "quant_method", "method") == "fbgemm_fp8":
        section = limited = configs.validate(_FBGEMM, source)
        limit = limited.activation_scale_ub
        config = Fp8Config("channel", activation_scale_ub=limit)
        tokens = ActivationScheme("float", 8, True, "token", upper_bound=limit, owner="fbgemm")
        fmt = ConfiguredFormat(Fp8Weight, config, tokens)
    else:
        section = stated = configs.validate(_FP8, source)
        config = _fp8_config(source, stated)
        fmt = ConfiguredFormat(Fp8Weight, config, _fp8_activations(stated))
    name = "fp8_inverse" if config.divide else "fp8"
    return section.claims(source, "fp8", name, fmt, bits=8, sym=True, unused=(UNUSED_SCALE,))


class _Mistral(configs.Section):
    qformat_weight: Literal["fp8_e4m3"]
    qscheme_act: Literal["TENSOR", "NO_SCALES"] | None = None


def read_mistral(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of the `quantization` of a params.json; inputs have a stored scale by default."""
    section = configs.validate(_Mistral, source)
    static = section.qscheme_act != "NO_SCALES"
    config = Fp8Config(input_scale=True if static else None, dtype=dtypes.float8_e4m3fn)
    stated = _FP8(activation_scheme="static" if static else "dynamic")
    fmt = ConfiguredFormat(Fp8Weight, config, _fp8_activations(stated))
    return section.claims(source, "mistral", "fp8", fmt, bits=8, sym=True)


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


def _fp8_config(source: configs.FoundConfig, section: _FP8) -> Fp8Config:
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


METHODS = (
    configs.Method(
        names=("fp8",),
        read=read_fp8,
        formats=(Fp8Weight,),
        variants=("fp8 (multiplying, or weight_scale_semantics inverse)",),
        activation_key="activation_scheme",
        ignored={
            "expert_dtype": configs.IgnoredKey(
                "states the dtype of experts; qload reads them by their tensors",
                neutral=(*NEUTRAL_VALUES, "fp8"),
            ),
        },
    ),
    configs.Method(
        names=("mistral",),
        read=read_mistral,
        formats=(Fp8Weight,),
        variants=("mistral (params.json with qformat_weight fp8_e4m3)",),
        activation_key="qscheme_act",
    ),
    configs.Method(
        names=("fbgemm_fp8",),
        read=read_fp8,
        formats=(Fp8Weight,),
        variants=("fbgemm_fp8",),
        activation_key="activation_scale_ub",
    ),
)
