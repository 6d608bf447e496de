"""Loaders of a checkpoint's formats, built from the claims of its config and from dialects.

A dialect is recognised by the own tensors of a layer that does not fit the config. A layer in a dialect of a
supported format is read, with a note. Any other known dialect raises UnsupportedFormatError with its name and
a program for it. `qload.detect.signatures` lists the names, dtypes and shapes of each dialect; a layer must
fit all of them. A layer without a matching dialect is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, Literal, overload

from qload.configs import Claims, FoundConfig, ModuleRule
from qload.detect.config_reader import named_modules, read_claims
from qload.detect.methods import METHODS, hqq, quanto, torchao
from qload.detect.signatures import COMFY, SIGNATURES, WORDS, LayerTensors, Signature
from qload.detect.torchao_header import has_header
from qload.errors import ArgumentError, ConfigError, QloadError, UnsupportedFormatError, checked
from qload.formats import (
    ROLES,
    AWQConfig,
    AWQWeight,
    CTMXFP4Weight,
    CTPackConfig,
    CTPackWeight,
    EETQConfig,
    EETQWeight,
    Exl2Config,
    Exl2Weight,
    Fp8Config,
    GPTQConfig,
    GPTQWeight,
    Marlin24Config,
    Marlin24Weight,
    MarlinConfig,
    MarlinWeight,
    ModelOptNVFP4Weight,
    MXFP8Weight,
    UnquantizedConfig,
    UnquantizedWeight,
    dialects,
)
from qload.formats.gptq import BITS
from qload.formats.mlx import with_method
from qload.formats.unquantized import FLOATS, PLAIN
from qload.layouts import STORED_MINUS_ONE, Stored, ZeroPoints
from qload.lazy_torch import torch
from qload.loader import (
    ConfiguredFormat,
    FormatLoader,
    ModuleLoader,
    RecognisedFormat,
    TensorSource,
    UnreadLoader,
    WeightsLoader,
)
from qload.loader.description import LayerDescriber
from qload.loader.exclusion import NOTHING_NAMED
from qload.loader.transforms import LayerTransforms, find_matrix
from qload.spec import Role, named
from qload.spec.weight import TARGET_LOADER, call_upward
from qload.storage import COMFY_METADATA, ComfyStorage, WeightStorage, metadata_of
from qload.storage.comfy import is_setting, parse_layers
from qload.storage.protocol import read_array

COMFY_METHOD = "comfyui"
PACKED_BITS = (2, 4, 8)  # bit widths without codes across words
METHOD_KEYS = ("quant_method", "method")
INVERSE = "weight_scale_inv"
SCALES = ("weight_scale", INVERSE, "scale")
INVERSE_FP8 = "the config does not state whether weight_scale_inv multiplies or divides"
AMBIGUOUS_FORMATS = {  # formats that need a config: ComfyUI stores other orders under the same names
    CTMXFP4Weight: "MXFP4",
    MXFP8Weight: "MXFP8",
    ModelOptNVFP4Weight: "NVFP4",
}
NO_CONFIG = "no config names its writer, and ModelOpt and ComfyUI store different orders under these names"


def refuse_foreign(source: FoundConfig | None, storage: WeightStorage) -> None:
    """Raise UnsupportedFormatError for a checkpoint of another program.

    With a quantization method in the config only unambiguous tensor names count: ComfyUI's and torchao's.
    Without one the first layer with a matching signature decides. Headers may describe layers of torchao.
    """
    if source is not None and source.values.get("quant_method") == COMFY_METHOD and is_comfy(storage):
        return
    _refuse_comfy_metadata(storage)
    methods = [source.values[key] for key in METHOD_KEYS if source.values.get(key)] if source else []
    if has_header(storage) and methods in ([], ["torchao"]):
        return
    for prefix, signature in _candidate_layers(storage, UNAMBIGUOUS if methods else BY_ENDING):
        layer = LayerTensors.of_storage(storage, prefix)
        if signature.matches(layer):
            raise _unsupported(signature, layer)


Marks = Mapping[str, Sequence[tuple[str, Signature]]]  # last part of a name -> (suffix, signature)


def _marks_by_ending(signatures: Iterable[Signature]) -> Marks:
    """Map the last part of each suffix of a first tensor to the suffix and its signature."""
    by_ending: dict[str, list[tuple[str, Signature]]] = {}
    for signature in signatures:
        for mark in signature.marks:
            by_ending.setdefault(mark.rpartition(".")[2], []).append((mark, signature))
    return by_ending


BY_ENDING = _marks_by_ending(SIGNATURES)
UNAMBIGUOUS = _marks_by_ending(
    row for row in SIGNATURES if row.marks in (("comfy_quant",), ("_weight_qdata",))
)


def _candidate_layers(storage: WeightStorage, by_ending: Marks) -> Iterator[tuple[str, Signature]]:
    """Yield (prefix, signature) of each layer with the first tensor of a signature."""
    for name in storage.keys():  # noqa: SIM118
        for mark, signature in by_ending.get(name.rpartition(".")[2], ()):
            if name == mark:
                yield "", signature
            elif name.endswith(f".{mark}"):
                yield name.removesuffix(f".{mark}"), signature


def _refuse_comfy_metadata(storage: WeightStorage) -> None:
    """Raise UnsupportedFormatError for ComfyUI layers declared in the metadata of a header."""
    for file, metadata in metadata_of(storage).items():
        layers = parse_layers(metadata.get(COMFY_METADATA, ""), file)
        if layers:
            name, mark = next(iter(layers.items()))
            raise UnsupportedFormatError(
                f"ComfyUI's own layers ({mark.get('format')!s:.40})",
                f"{COMFY_METADATA} in the header of {file} has {len(layers)} layers, as {name:.200}",
                remedy=COMFY,
            )


def is_comfy(storage: WeightStorage | None) -> bool:
    """Return whether a storage is a `ComfyStorage`, also below stacks of experts."""
    return isinstance(getattr(storage, "storage", storage), ComfyStorage)


def _unsupported(signature: Signature, layer: LayerTensors) -> UnsupportedFormatError:
    """Build the error for a layer, with the names of its tensors."""
    stored = [
        f"{suffix} ({str(info.stored_dtype).removeprefix('torch.')})"
        for part in signature.parts
        for suffix in part.suffixes
        if (info := layer.info(suffix))
    ]
    reason = f"{layer.prefix or 'the checkpoint'} has {' and '.join(stored)}"
    return UnsupportedFormatError(signature.dialect, reason, remedy=signature.remedy)


@dataclass(frozen=True)
class Recogniser:
    """Recogniser of dialects, for the layers of a checkpoint that do not fit its config.

    Attributes
    ----------
    formats
        Formats of the config, with block size and meaning of `weight_scale_inv`.
    configured
        True for a checkpoint with a quantization config.
    """

    formats: tuple[ConfiguredFormat, ...] = ()
    configured: bool = True

    def recognise(
        self, weights: TensorSource, prefix: str
    ) -> RecognisedFormat | UnsupportedFormatError | None:
        """Identify the dialect of the layer `prefix`: a supported format, the error to raise, or None."""
        layer = LayerTensors(prefix, weights.has_tensor, weights.info)
        for candidate in (*self._candidates, *self._packed(layer, weights)):
            if self._is_block_grid(candidate, layer):
                continue
            if _has_tensors(candidate, layer) and _has_shapes(candidate, layer, weights):
                return self._accept_unambiguous(candidate, layer)
        packs_words = any("qweight" in spec.suffixes for fmt in self.formats for spec in fmt.specs)
        rows = SIGNATURES if packs_words or not self.configured else (*SIGNATURES, WORDS)
        names = {fmt.weight_type.format for fmt in self.formats}
        signature = next((row for row in rows if names.isdisjoint(row.unless) and row.matches(layer)), None)
        return None if signature is None else _unsupported(signature, layer)

    def _accept_unambiguous(
        self, fmt: ConfiguredFormat, layer: LayerTensors
    ) -> RecognisedFormat | UnsupportedFormatError:
        """Return the supported format with a note, or the error for ambiguous values."""
        name, config = fmt.weight_type.format, fmt.config
        if not self.configured and fmt.weight_type in AMBIGUOUS_FORMATS:
            remedy = "add the quantization_config of its writer"
            reason = f"{layer.prefix}: {NO_CONFIG}"
            return UnsupportedFormatError(AMBIGUOUS_FORMATS[fmt.weight_type], reason, remedy=remedy)
        if isinstance(config, Fp8Config):
            name = f"{name} with a scale for each {_scale_unit(config)}"
            inverse = layer.info(INVERSE) is not None and config.per != "block"
            if inverse and not any(isinstance(fmt.config, Fp8Config) for fmt in self.formats):
                remedy = "state quant_method fp8, with weight_scale_semantics inverse if it divides"
                reason = f"{layer.prefix}: {INVERSE_FP8}"
                return UnsupportedFormatError("FP8 with two readings", reason, remedy=remedy)
        return RecognisedFormat(fmt, f"the config does not name its format; read as {name}, by its tensors")

    def _is_block_grid(self, candidate: ConfiguredFormat, layer: LayerTensors) -> bool:
        """Return whether the scale is a grid of blocks, cut to one entry, and not a scale of the tensor.

        It has two axes, and the config states a scale for each block.
        """
        config = candidate.config
        if not isinstance(config, Fp8Config) or config.per != "tensor":
            return False
        if not any(isinstance(fmt.config, Fp8Config) and fmt.config.block for fmt in self.formats):
            return False
        return any((info := layer.info(scale)) and len(info.shape) == 2 for scale in SCALES)

    @cached_property
    def _candidates(self) -> tuple[ConfiguredFormat, ...]:
        """Formats that the tensors of a layer define without a config."""
        return dialects(self.formats)

    def _packed(self, layer: LayerTensors, weights: TensorSource) -> Iterator[ConfiguredFormat]:
        """Yield pack-quantized with bits and group size of the shapes, unless the config has this format."""
        shape, words, scale = (layer.info(f"weight_{name}") for name in ("shape", "packed", "scale"))
        stated = any(fmt.weight_type is CTPackWeight for fmt in self.formats)
        if stated or shape is None or words is None or scale is None:
            return
        if (len(words.shape), len(scale.shape), shape.shape) != (2, 2, (2,)):
            return
        K = int(weights.read_fact(named(layer.prefix, "weight_shape"), Role.INDEX)[1])
        width, groups = 32 * words.shape[1], scale.shape[1]
        if K < 1 or width % K or width // K not in PACKED_BITS or groups < 1 or K % groups:
            return
        size = -1 if groups == 1 else K // groups
        symmetric, ordered = layer.info("weight_zero_point") is None, layer.info("weight_g_idx") is None
        yield ConfiguredFormat(CTPackWeight, CTPackConfig(width // K, size, symmetric, not ordered))


def _scale_unit(config: Fp8Config) -> str:
    """Unit with one scale, in words: tensor, output or block."""
    if config.block is not None:
        return "block of {} outputs and {} inputs".format(*config.block)
    return {"channel": "output"}.get(config.per or "", "tensor")


def _has_tensors(fmt: ConfiguredFormat, layer: LayerTensors) -> bool:
    """Return whether a layer stores each tensor of a format under one name, in a dtype of the format."""
    for spec in fmt.specs:
        stored = [info for suffix in spec.suffixes if (info := layer.info(suffix))]
        if len(stored) > 1 or (not stored and not spec.optional):
            return False
        if any(info.stored_dtype not in spec.dtypes for info in stored):
            return False
    return True


def _has_shapes(fmt: ConfiguredFormat, layer: LayerTensors, weights: TensorSource) -> bool:
    """Return whether the shapes of a layer fit a format."""
    try:
        LayerDescriber((fmt,)).describe(weights, layer.prefix)
    except QloadError:
        return False
    return True


log: logging.Logger = logging.getLogger("qload")


LEGACY = {"bits": "gptq_bits", "group_size": "gptq_groupsize", "sym": "gptq_sym"}


class DefaultWeightsLoader(FormatLoader):
    """Loader of plain weights. A layer in any other format is an error."""

    @checked
    def __init__(self) -> None:
        super().__init__(PLAIN)


class GPTQWeightsLoader(FormatLoader):
    """Loader of GPTQ layers and plain layers, told apart by their tensors.

    The keywords `bits`, `group_size`, `zeros` and `desc_act` are those of `GPTQConfig`.
    """

    @checked
    def __init__(
        self,
        *,
        bits: int,
        group_size: int,
        zeros: ZeroPoints = STORED_MINUS_ONE,
        desc_act: bool | None = None,
    ) -> None:
        config = GPTQConfig(bits, group_size, zeros, desc_act=desc_act, indexed=True if desc_act else None)
        super().__init__(ConfiguredFormat(GPTQWeight, config), PLAIN)


class AWQWeightsLoader(FormatLoader):
    """Loader of AWQ GEMM layers and plain layers, told apart by their tensors.

    The keywords `group_size`, `bits` and `zero_point` are those of `AWQConfig`.
    """

    @checked
    def __init__(self, *, group_size: int, bits: int = 4, zero_point: bool = True) -> None:
        super().__init__(ConfiguredFormat(AWQWeight, AWQConfig(group_size, bits, zero_point)), PLAIN)


class MarlinWeightsLoader(FormatLoader):
    """Loader of layers in the order of Marlin's kernel, dense or 2:4 sparse, and plain layers.

    The keywords `group_size` and `bits` are those of `MarlinConfig`; `is_marlin_24`: layers are 2:4 sparse.
    """

    @checked
    def __init__(self, *, group_size: int, bits: int = 4, is_marlin_24: bool = False) -> None:
        dense = ConfiguredFormat(MarlinWeight, MarlinConfig(group_size, bits))
        sparse = ConfiguredFormat(Marlin24Weight, Marlin24Config(group_size, bits))
        super().__init__(sparse if is_marlin_24 else dense, PLAIN)


class Exl2WeightsLoader(FormatLoader):
    """Loader of EXL2 layers, with bit widths from their tensors, and plain layers."""

    @checked
    def __init__(self) -> None:
        super().__init__(ConfiguredFormat(Exl2Weight, Exl2Config()), PLAIN)


class EETQWeightsLoader(FormatLoader):
    """Loader of EETQ layers and plain layers, told apart by their tensors."""

    @checked
    def __init__(self) -> None:
        super().__init__(ConfiguredFormat(EETQWeight, EETQConfig()), PLAIN)


KERNELS = ("auto", "marlin", "strips", "panels", "exllama")


@dataclass(frozen=True)
class KernelTarget:
    """Target kernel of repacking, with options.

    ArgumentError for an attribute of another type, and for an option of another kernel.

    Attributes
    ----------
    kernel
        "marlin", "strips", "panels" or "exllama"; or "auto", the fastest supported one: strips on a GPU
        from Ampere on, panels on a CPU, Marlin's order for weights that these cannot store, ExLlama's order
        for weights that none of these can store and a GPU kernel can read.
    zeros
        Convention of zero points for "exllama"; None: the checkpoint's.
    dtype, exponent_bias
        Arguments of `repack` for FP8, NVFP4 and MXFP4 and Marlin's kernel, the second for FP8 alone. Without
        a dtype "auto" does not repack these formats.

    Examples
    --------
    >>> import torch
    >>> from qload import KernelTarget, MemoryStorage, Weights, loader_from_config
    >>> tensors = {"up.weight": torch.ones(64, 128).to(torch.float8_e4m3fn), "up.weight_scale": torch.ones(1)}
    >>> target = KernelTarget("marlin", dtype=torch.bfloat16)
    >>> loader = loader_from_config({"quant_method": "fp8"}, target=target)
    >>> weight = Weights(MemoryStorage(tensors), loader=loader).get_weights("up")
    >>> weight.format, weight.scales.dtype
    ('fp8_marlin', torch.bfloat16)
    """

    kernel: Literal["auto", "marlin", "strips", "panels", "exllama"]
    zeros: ZeroPoints | None = None
    dtype: torch.dtype | None = None
    exponent_bias: bool = True

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            expected = f"None, a KernelTarget, or one of {', '.join(KERNELS)}"
            raise ArgumentError("target", expected, repr(self.kernel))
        if not isinstance(self.zeros, ZeroPoints | None):
            raise ArgumentError("target: zeros", "None, or such as StoredMinusOne()", repr(self.zeros))
        if not isinstance(self.dtype, torch.dtype | None):
            raise ArgumentError("target: dtype", "None, or a dtype of torch's", repr(self.dtype))
        if not isinstance(self.exponent_bias, bool):
            raise ArgumentError("target: exponent_bias", "True or False", repr(self.exponent_bias))
        if self.zeros is not None and self.kernel != "exllama":
            raise ArgumentError("target: zeros", "None, as only exllama has a choice", repr(self.zeros))
        if self.dtype is not None and self.kernel in ("strips", "panels", "exllama"):
            raise ArgumentError(
                "target: dtype", "None, as only FP8 and FP4 for Marlin take one", str(self.dtype)
            )


Target = Literal["auto", "marlin", "strips", "panels", "exllama"] | KernelTarget


@overload
def loader_from_config(
    quantization_config: Mapping[str, Any] | None,
    storage: WeightStorage | None = None,
    *,
    target: None = None,
) -> FormatLoader: ...


@overload
def loader_from_config(
    quantization_config: Mapping[str, Any] | None, storage: WeightStorage | None = None, *, target: Target
) -> WeightsLoader: ...


def loader_from_config(
    quantization_config: Mapping[str, Any] | None,
    storage: WeightStorage | None = None,
    *,
    target: Target | None = None,
) -> WeightsLoader:
    """Build the loader for a `quantization_config`; None for plain weights.

    Parameters
    ----------
    quantization_config
        Section of a checkpoint's JSON.
    storage
        Searched for the setting tensors of old GPTQ checkpoints (`gptq_bits`, `gptq_groupsize`), which take
        precedence over the config.
    target
        Kernel to repack the loaded weights for: "marlin", "strips", "panels", "exllama", "auto" for the
        fastest kernel on the weight's device, or a `KernelTarget` with options; None keeps the checkpoint's
        types.

    Raises
    ------
    ConfigError
        The config is malformed, or contradicts the setting tensors.
    UnsupportedFormatError
        The method is not supported.
    ArgumentError
        `storage` is not a storage.

    Examples
    --------
    >>> from qload import loader_from_config
    >>> loader = loader_from_config({"quant_method": "gptq", "bits": 4, "group_size": 128})
    >>> [fmt.weight_type.__name__ for fmt in loader.formats]
    ['GPTQWeight', 'UnquantizedWeight']
    """
    if quantization_config is not None and not isinstance(quantization_config, Mapping):
        raise ConfigError(
            "quantization_config", "config", "a mapping or None", type(quantization_config).__name__
        )
    if not isinstance(storage, WeightStorage | None):
        raise ArgumentError("storage", "None, or a storage such as MemoryStorage", type(storage).__name__)
    source = None
    if quantization_config is not None:
        source = FoundConfig("config", "quantization_config", with_method(quantization_config))
    claims = effective_claims(source, storage)
    for note in claims.notes if claims else ():
        log.info("%s", note)
    return for_target(loader_from_claims(claims, source, storage), target)


def for_target(loader: WeightsLoader, target: Target | None) -> WeightsLoader:
    """Wrap `loader` to repack its weights for a kernel; `target` None: return `loader`."""
    if target is None:
        return loader
    kernel_target = target if isinstance(target, KernelTarget) else KernelTarget(target)
    repacking: WeightsLoader = call_upward(TARGET_LOADER, loader, kernel_target)
    return repacking


def loader_from_claims(
    claims: Claims | None, source: FoundConfig | None, storage: WeightStorage | None
) -> FormatLoader:
    """Build the loader for the claims of a config `source`; None for plain weights."""
    if claims is None:
        plain_loader = DefaultWeightsLoader()
        plain_loader.recognise_by(Recogniser(configured=False))
        return plain_loader
    plain = ConfiguredFormat(UnquantizedWeight, UnquantizedConfig(unused=claims.unused))
    formats = [replace(fmt, claims=fmt.claims or claims.of_layers) for fmt in claims.formats]
    if claims.rules:
        *rules, others = claims.rules
        loader: FormatLoader = ModuleLoader(
            [(rule.selects, _loader_of_rule(rule)) for rule in rules], _loader_of_rule(others)
        )
    else:
        loader = FormatLoader(*formats, plain, exclusions=claims.exclusions)
    loader.named = named_modules(source) if source else NOTHING_NAMED
    stored = storage.keys() if storage else ()
    loader.config_tensors = tuple(name for name in LEGACY.values() if name in stored)
    if claims.method != COMFY_METHOD:
        loader.recognise_by(Recogniser(claims.formats))
    else:  # marks name one format
        if not is_comfy(storage):
            reason = f"{claims.file} has ComfyUI's marks, and the storage does not convert marked layers"
            remedy = "open_checkpoint reads the file with its marks"
            raise UnsupportedFormatError("ComfyUI's layers without their file", reason, remedy=remedy)
        loader.config_tensors += tuple(filter(is_setting, stored))
    if claims.settings:
        loader.config_tensors += tuple(name for name in stored if name.rpartition(".")[2] in claims.settings)
    if claims.transforms:
        if storage is None:
            reason = f"the transform_config of {claims.file} needs matrices of the checkpoint"
            remedy = "open_checkpoint, or the argument storage, reads the matrices"
            raise UnsupportedFormatError("transforms without their checkpoint", reason, remedy=remedy)
        loader.transforms = LayerTransforms(claims.transforms, storage)
        loader.config_tensors += loader.transforms.names
    elif lost := find_matrix(stored):
        reason = f"{lost} is stored, and {claims.file} has no transform_config of inputs or outputs"
        remedy = "restore transform_config from the original config, or remove the tensor if it has no effect"
        raise UnsupportedFormatError("transforms without a config", reason, remedy=remedy)
    return loader


def _loader_of_rule(rule: ModuleRule) -> FormatLoader:
    """Build the loader of the modules of a rule; plain layers load with every rule."""
    if isinstance(rule.formats, UnsupportedFormatError):
        return UnreadLoader(rule.formats, PLAIN, tuple(ROLES))
    if rule.formats and rule.formats[0].weight_type.plain:
        return FormatLoader(*rule.formats)
    return FormatLoader(*rule.formats, PLAIN, exclusions=rule.exclusions)


def effective_claims(
    source: FoundConfig | None, storage: WeightStorage | None, model: Mapping[str, Any] = MappingProxyType({})
) -> Claims | None:
    """Claims of the config; setting tensors of the checkpoint take precedence.

    `model`: the model's config.json, for tensors that no config describes.
    """
    if source is None and storage is not None:
        found = (reader.found_config(storage, model) for reader in (quanto, hqq, torchao))
        source = next(filter(None, found), None)
    if storage is not None:
        refuse_foreign(source, storage)
    if storage is not None and source is not None and source.section:
        has_method = any(source.values.get(key) for key in METHOD_KEYS)
        if not has_method and next(_quantized(storage), None) is None:
            note = f"{source.file}: {source.section} has no quant_method, and all weights are plain"
            file, section = source.file, source.section
            return Claims("unquantized", "unquantized", file=file, section=section, notes=(note,))
    claims = _claims(source, storage) if source else None
    complete = METHODS[claims.method].complete if claims else None
    if claims and source and complete and storage is not None:
        claims = complete(claims, source, storage)
    names = storage.keys() if storage else ()
    if storage is None or LEGACY["bits"] not in names:
        return claims
    if claims and claims.method not in ("gptq", "awq"):
        raise ConfigError(claims.file, "quant_method", "gptq, because of the tensor gptq_bits", claims.method)
    outdated = claims if claims and claims.method == "awq" else None
    if outdated:  # no layer of awq is stored any more
        log.warning("%s claims awq; there is a tensor gptq_bits, which is believed: gptq", outdated.file)
        claims = None
    if claims and claims.rules:
        raise ConfigError(claims.file, "dynamic", "nothing, as gptq_bits applies to all modules", "rules")
    stored = {key: _scalar(storage, name) for key, name in LEGACY.items() if name in names}
    if "group_size" not in stored:
        raise ConfigError("gptq_bits", LEGACY["group_size"], "a tensor, because of gptq_bits", "nothing")
    bits, group_size = stored["bits"], stored["group_size"]
    base = claims or Claims("gptq", "gptq", bits, group_size, file=LEGACY["bits"])
    if outdated:
        base = replace(base, file=outdated.file, exclusions=outdated.exclusions)
    sym = bool(stored["sym"]) if "sym" in stored else base.sym
    settled = replace(base, bits=bits, group_size=group_size, sym=sym)
    if claims and (claims.bits, claims.group_size) != (settled.bits, settled.group_size):
        log.warning(
            "%s claims %d bits, group size %d; gptq_bits and gptq_groupsize say %d, %d and are believed",
            claims.file,
            claims.bits,
            claims.group_size,
            settled.bits,
            settled.group_size,
        )
    if settled.bits not in BITS:
        raise ConfigError(LEGACY["bits"], "value", "2, 3, 4 or 8", str(settled.bits))
    if settled.group_size == 0:
        raise ConfigError(LEGACY["group_size"], "value", "-1 or at least 1", "0")
    zeros: ZeroPoints = Stored() if settled.format == "gptq_v2" else STORED_MINUS_ONE
    indexed = True if settled.desc_act else None
    config = GPTQConfig(bits, group_size, zeros, desc_act=settled.desc_act, indexed=indexed)
    return replace(settled, formats=(ConfiguredFormat(GPTQWeight, config),))


def _claims(source: FoundConfig, storage: WeightStorage | None) -> Claims:
    """Read the claims of a config; an UnsupportedFormatError names the quantized tensors."""
    try:
        return read_claims(source)
    except UnsupportedFormatError as error:
        stored = sorted(_quantized(storage)) if storage else []
        if not stored:
            raise
        reason = f"{error.reason}; {len(stored)} tensors are stored so, as {stored[0]:.200}"
        raise replace(error, reason=reason) from None


def _quantized(storage: WeightStorage) -> Iterator[str]:
    """Yield the names of tensors that belong to quantized layers, by name and dtype."""
    for name in storage.keys():  # noqa: SIM118
        info = storage.info(name)
        special = ROLES.get(name.rpartition(".")[2], Role.FLOAT) is not Role.FLOAT
        if special or (len(info.shape) > 1 and info.stored_dtype not in FLOATS):
            yield name


def _scalar(storage: WeightStorage, name: str) -> int:
    shape = storage.info(name).shape
    if prod(shape) != 1:
        raise ConfigError(name, "value", "one whole number, at least -1", f"a tensor of shape {shape}")
    value = read_array(storage, name).item()
    if isinstance(value, complex) or not float(value).is_integer() or not -1 <= value < 1 << 31:
        raise ConfigError(name, "value", "one whole number, at least -1", str(value))
    return int(value)
