"""Recognition of dialects: layers that do not fit the formats of the config, by their own tensors.

A layer in a dialect of a supported format is read, with a note. Any other known dialect raises
UnsupportedFormatError with its name and a program for it. `qload.detect.signatures` lists the names, dtypes
and shapes of each dialect; a layer must fit all of them. A layer without a matching dialect is an error.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from qload.configs import FoundConfig
from qload.detect.signatures import COMFY, SIGNATURES, WORDS, LayerTensors, Signature
from qload.errors import QloadError, StorageError, UnsupportedFormatError
from qload.formats import (
    CTMXFP4Weight,
    CTPackConfig,
    CTPackWeight,
    Fp8Config,
    ModelOptNVFP4Weight,
    MXFP8Weight,
    dialects,
)
from qload.loader import ConfiguredFormat, RecognisedFormat, TensorSource
from qload.loader.description import LayerDescriber
from qload.spec import Role, named
from qload.storage import WeightStorage, metadata_of, parse_json

PACKED_BITS = (2, 4, 8)  # bit widths without codes across words
METHOD_KEYS = ("quant_method", "method")
INVERSE = "weight_scale_inv"
SCALES = ("weight_scale", INVERSE, "scale")
COMFY_METADATA = "_quantization_metadata"
MAX_METADATA_CHARACTERS = 1 << 24

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
    Without one the first layer with a matching signature decides.
    """
    _refuse_comfy_metadata(storage)
    has_method = source is not None and any(source.values.get(key) for key in METHOD_KEYS)
    for prefix, signature in _candidate_layers(storage, UNAMBIGUOUS if has_method else BY_ENDING):
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
        declared_layers = metadata.get(COMFY_METADATA)
        layers = _comfy_layers(declared_layers, file) if declared_layers else {}
        if layers:
            name, declared = next(iter(layers.items()))
            layer_format = declared.get("format") if isinstance(declared, dict) else None
            raise UnsupportedFormatError(
                f"ComfyUI's own layers ({layer_format!s:.40})",
                f"{COMFY_METADATA} in the header of {file} has {len(layers)} layers, as {name:.200}",
                remedy=COMFY,
            )


def _comfy_layers(text: str, file: str) -> Mapping[str, object]:
    """Parse the layers in ComfyUI's metadata; empty for any other text."""
    if len(text) > MAX_METADATA_CHARACTERS:
        return {}
    try:
        value = parse_json(text.encode(), file)
    except (ValueError, RecursionError, StorageError):
        return {}
    layers = value.get("layers") if isinstance(value, dict) else None
    return layers if isinstance(layers, dict) else {}


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
