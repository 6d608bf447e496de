"""`quant_method: torchao`: the JSON in the header of each file states class and attributes of each layer.

Headers take precedence over the config, which is optional. Several classes are formats of other programs
under torchao's names:

    Float8Tensor              fp8
    Int8Tensor                int-quantized of compressed-tensors; zero points that are all 0 are left out
    IntxUnpackedToInt8Tensor  intx
    Int4Tensor                int4
    NVFP4Tensor               NVFP4 of ModelOpt
    MXTensor                  MXFP4 and MXFP8

Scales of the last two may be swizzled (`layouts.swizzle`). Layers of other classes are not read; the whole
checkpoint is unsupported if no layer has one of these. Source: torchao 0.18.0 and transformers 5.23.0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from qload import configs
from qload.detect.signatures import TORCHAO, TORCHAO_DIALECT
from qload.detect.torchao_header import (
    CLASSES,
    PARAMETER,
    PLAIN_CLASS,
    VARIANTS,
    DescribedLayer,
    described_layers,
)
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats import (
    CTIntConfig,
    CTIntWeight,
    CTMXFP4Weight,
    Fp8Config,
    Fp8Weight,
    ModelOptNVFP4Weight,
    MXFP4Config,
    MXFP8Config,
    MXFP8Weight,
    NVFP4Config,
    TorchAOInt4Config,
    TorchAOInt4Weight,
    TorchAOIntxConfig,
    TorchAOIntxWeight,
)
from qload.formats.torchao import INPUT_SCALE, QDATA, SCALE, SECOND_SCALE, ZERO_POINT
from qload.loader import ConfiguredFormat
from qload.spec import ActivationScheme, LayerClaims
from qload.storage import WeightStorage

METHOD = "torchao"
UNDESCRIBED = UnsupportedFormatError(TORCHAO_DIALECT, "no header describes it", remedy=TORCHAO)
MAX_KINDS = 256  # of layers: each lookup of a layer tries all kinds
STATED_CLASSES = {  # beginning of a config's name -> class
    "Float8": "Float8Tensor",
    "Int8WeightOnly": "Int8Tensor",
    "Int8DynamicActivationInt8": "Int8Tensor",
    "Intx": "IntxUnpackedToInt8Tensor",
    "Int8DynamicActivationIntx": "IntxUnpackedToInt8Tensor",
    "NVFP4": "NVFP4Tensor",
    "MX": "MXTensor",
}
NAMES = (("weight", QDATA), ("weight_scale", SCALE))
ZERO_NAMES = (*NAMES, ("weight_zero_point", ZERO_POINT))
NVFP4_NAMES = (*NAMES, ("weight_scale_2", SECOND_SCALE), ("input_scale", INPUT_SCALE))
MXFP4_NAMES = (("weight_packed", QDATA), ("weight_scale", SCALE))
STRATEGIES = {"PerRow": "token", "PerTensor": "tensor"}
BITS = {f"int{bits}": bits for bits in range(1, 9)}


class _Value(configs.Entry):
    kind: str = Field(validation_alias="_type")
    data: Any = Field(default=None, validation_alias="_data")


class _Blocks(configs.Entry):
    block_size: configs.Block


class _Float8(configs.Entry):
    block_size: configs.Block | None = None
    act_quant_kwargs: _Value | None = None


class _Int8(_Blocks):
    act_quant_kwargs: _Value | None = None


class _Intx(_Blocks):
    target_dtype: _Value
    activation_quantization: str | None = None


class _NVFP4(configs.Entry):
    block_size: Annotated[int, configs.one_of(16)]
    is_swizzled_scales: bool = False
    act_quant_kwargs: _Value | None = None


class _MX(configs.Entry):
    block_size: Annotated[int, configs.one_of(32)]
    elem_dtype: _Value
    is_swizzled_scales: bool = False
    act_quant_kwargs: _Value | None = None


class _Section(configs.Section):
    quant_type: dict[str, Any] | str | None = None
    include_input_output_embeddings: bool | None = None
    untie_embedding_weights: bool | None = None


def read_torchao(source: configs.FoundConfig) -> configs.Claims:
    """Read the name of the quantization from a config; formats are in headers alone."""
    section = configs.validate(_Section, source)
    stated = section.quant_type
    default = stated.get("default") if isinstance(stated, dict) else stated
    kind = default.get("_type") if isinstance(default, dict) else default
    name = kind if isinstance(kind, str) else METHOD
    return section.claims(source, METHOD, name[:80])


def found_config(storage: WeightStorage, model: Mapping[str, Any]) -> configs.FoundConfig | None:
    """Config of a checkpoint without one, whose headers describe quantized layers; None for any other."""
    layer = next(_quantized_layers(storage), None)
    return configs.FoundConfig(layer.file, "", {"quant_method": METHOD}) if layer else None


def _quantized_layers(storage: WeightStorage) -> Iterator[DescribedLayer]:
    return (layer for layer in described_layers(storage) if layer.tensor.kind != PLAIN_CLASS)


def with_header(
    claims: configs.Claims, source: configs.FoundConfig, storage: WeightStorage
) -> configs.Claims:
    """Add the formats of the layers in headers to the claims of a config.

    ConfigError for a malformed header; UnsupportedFormatError if no layer has a supported class.
    """
    layers = list(_quantized_layers(storage))
    if not layers:
        return claims
    kinds: dict[tuple[Any, ...], set[str]] = {}
    refused: dict[str, tuple[UnsupportedFormatError, set[str]]] = {}
    for layer in layers:
        fmt, module = layer_format(layer), layer.name.removesuffix(PARAMETER)
        if isinstance(fmt, UnsupportedFormatError):
            refused.setdefault(fmt.format, (fmt, set()))[1].add(module)
        else:
            kinds.setdefault((fmt, fmt.activations), set()).add(module)
        if len(kinds) + len(refused) > MAX_KINDS:
            expected = f"at most {MAX_KINDS} kinds of layers"
            raise ConfigError(layer.file, f"header: {layer.name:.200}", expected, "another kind")
    if not kinds:
        raise next(iter(refused.values()))[0]
    formats = tuple(dict.fromkeys(fmt for fmt, _ in kinds))
    return replace(
        claims,
        bits=_common(formats, "bits"),
        group_size=_common(formats, "group_size"),
        formats=formats,
        rules=(
            *(configs.ModuleRule((fmt,), frozenset(names).__contains__) for (fmt, _), names in kinds.items()),
            *(configs.ModuleRule(error, frozenset(names).__contains__) for error, names in refused.values()),
            configs.ModuleRule(UNDESCRIBED),
        ),
        notes=(*claims.notes, *_notes(claims, layers)),
    )


def layer_format(layer: DescribedLayer) -> ConfiguredFormat | UnsupportedFormatError:
    """Format of a layer, or the error of an unsupported class."""
    kind = layer.tensor.kind
    if kind not in CLASSES:
        return layer.unsupported(kind)
    block = layer.tensor.attributes.get("block_size")
    if not layer.name.endswith(PARAMETER) or (isinstance(block, list) and len(block) > 2):
        return layer.unsupported(f"{kind} of stacked experts")
    fmt = READERS[kind](layer)
    if isinstance(fmt, UnsupportedFormatError):
        return fmt
    known = {suffix.removeprefix("_weight_") for _, suffix in fmt.stored or ZERO_NAMES}
    unknown = [name for name in layer.tensor.tensors if name not in known]
    return layer.unsupported(f"{kind} with {', '.join(unknown)}") if unknown else fmt


def _float8(layer: DescribedLayer) -> ConfiguredFormat:
    values = layer.read(_Float8)
    block, inputs = values.block_size, _inputs("float", values.act_quant_kwargs)
    config = Fp8Config()
    if block is not None:
        rows, columns = layer.covers(block)
        config = Fp8Config("block", (block[0], block[1]))
        if columns and (rows or block[0] == 1):
            config = Fp8Config("channel" if block[0] == 1 else "tensor")
    return ConfiguredFormat(Fp8Weight, config, inputs, LayerClaims(8), NAMES)


def _int8(layer: DescribedLayer) -> ConfiguredFormat:
    values = layer.read(_Int8)
    block, inputs = values.block_size, _inputs("int", values.act_quant_kwargs)
    rows, columns = layer.covers(block)
    is_tensor = rows and columns and block[0] > 1
    per_output = block[0] == 1 and columns
    zeros: Literal["checked", "as stored"] = "checked" if is_tensor or per_output else "as stored"
    config = CTIntConfig(None if is_tensor else (block[0], -1 if columns else block[1]), zeros=zeros)
    return ConfiguredFormat(CTIntWeight, config, inputs, LayerClaims(8), ZERO_NAMES)


def _intx(layer: DescribedLayer) -> ConfiguredFormat | UnsupportedFormatError:
    values = layer.read(_Intx)
    bits, (rows, size) = BITS.get(str(values.target_dtype.data)), values.block_size
    if bits is None or rows != 1:
        return layer.unsupported(f"intx of {values.target_dtype.data!s:.20} in blocks of {rows} outputs")
    inputs = None
    if values.activation_quantization == "int8_asym_per_token":
        inputs = ActivationScheme("int", 8, True, "token", symmetric=False)
    size = -1 if layer.covers((rows, size))[1] else size
    claims = LayerClaims(bits, size)
    return ConfiguredFormat(TorchAOIntxWeight, TorchAOIntxConfig(bits, size), inputs, claims)


def _int4(layer: DescribedLayer) -> ConfiguredFormat | UnsupportedFormatError:
    rows, size = layer.read(_Blocks).block_size
    if rows != 1:
        return layer.unsupported(f"int4 in blocks of {rows} outputs")
    return ConfiguredFormat(TorchAOInt4Weight, TorchAOInt4Config(size), claims=LayerClaims(4, size))


def _nvfp4(layer: DescribedLayer) -> ConfiguredFormat:
    values = layer.read(_NVFP4)
    config = NVFP4Config(
        swizzled=values.is_swizzled_scales, second="per_tensor_scale" in layer.tensor.tensors
    )
    return ConfiguredFormat(ModelOptNVFP4Weight, config, None, LayerClaims(4, 16), NVFP4_NAMES)


def _mx(layer: DescribedLayer) -> ConfiguredFormat | UnsupportedFormatError:
    values = layer.read(_MX)
    element, swizzled = values.elem_dtype.data, values.is_swizzled_scales
    if element == "float8_e4m3fn":
        config = MXFP8Config(swizzled)
        return ConfiguredFormat(MXFP8Weight, config, None, LayerClaims(8, 32), NAMES)
    if element == "float4_e2m1fn_x2":
        mxfp4 = MXFP4Config(swizzled=swizzled)
        return ConfiguredFormat(CTMXFP4Weight, mxfp4, None, LayerClaims(4, 32), MXFP4_NAMES)
    return layer.unsupported(f"MXTensor of {element!s:.40}")


READERS = dict(zip(CLASSES, (_float8, _int8, _intx, _int4, _nvfp4, _mx), strict=True))


def _inputs(number: Literal["float", "int"], stated: _Value | None) -> ActivationScheme | None:
    """Scheme of dynamic inputs; None without one, or if qload does not support it."""
    if stated is None or not isinstance(stated.data, dict):
        return None
    values = stated.data
    granularity = values.get("granularity")
    kind = granularity.get("_type") if isinstance(granularity, dict) else None
    mapping = values.get("mapping_type")
    is_symmetric = not isinstance(mapping, dict) or mapping.get("_data") == "SYMMETRIC"
    bounded = any(values.get(key) for key in ("hp_value_lb", "hp_value_ub", "reduce_range"))
    if bounded or not is_symmetric or not isinstance(kind, str) or kind not in STRATEGIES:
        return None
    owner: Literal["transformers", "compressed-tensors"] = (
        "transformers" if number == "float" else "compressed-tensors"
    )
    return ActivationScheme(number, 8, True, STRATEGIES[kind], owner=owner)


def _common(formats: Sequence[ConfiguredFormat], claim: str) -> int | None:
    """Claim that all formats share; None if they differ."""
    stated = {getattr(fmt.claims, claim) for fmt in formats}
    value: int | None = stated.pop() if len(stated) == 1 else None
    return value


def _notes(claims: configs.Claims, layers: Sequence[DescribedLayer]) -> Iterator[str]:
    """Yield notes on classes that contradict the config, and on quantized inputs that no linear quantizes."""
    found = sorted({layer.tensor.kind for layer in layers})
    stated = next((name for start, name in STATED_CLASSES.items() if claims.format.startswith(start)), None)
    if stated and stated not in found:
        yield f"{claims.file} states {claims.format}, headers describe {', '.join(found)} and are believed"
    keys = ("act_quant_kwargs", "activation_quantization")
    quantizing = [layer for layer in layers if any(layer.tensor.attributes.get(key) for key in keys)]
    unread = [layer for layer in quantizing if getattr(layer_format(layer), "activations", None) is None]
    if unread:
        names = f"{len(unread)} layers, as {unread[0].name:.200}"
        yield f"torchao quantizes the inputs of {names}; linears of qload take them as they are"


METHODS = (
    configs.Method(
        names=(METHOD,),
        read=read_torchao,
        formats=(
            Fp8Weight,
            CTIntWeight,
            TorchAOIntxWeight,
            TorchAOInt4Weight,
            ModelOptNVFP4Weight,
            MXFP8Weight,
            CTMXFP4Weight,
        ),
        variants=VARIANTS,
        complete=with_header,
        activation_key="act_quant_kwargs of headers",
        activation_formats=(Fp8Weight, CTIntWeight, TorchAOIntxWeight),
    ),
)
