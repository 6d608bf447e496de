"""Conversion targets, and the check that a target can represent a layer exactly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from qload.architecture.published_names import transformers_name
from qload.checkpoint import MARLIN_CHECKPOINT
from qload.conversion import float4, fp8
from qload.conversion.output_files import (
    OutputItem,
    dequantize_layer,
    item_from_tensors,
    layer_bytes,
    load_header,
    load_layer,
    to_integers,
    weight_tensors,
)
from qload.devices import LazyCodes
from qload.errors import QloadError, RepackError
from qload.formats import (
    AWQWeight,
    CTPackWeight,
    Fp8Weight,
    GGUFWeight,
    GPTQWeight,
    Marlin24Weight,
    MarlinWeight,
    QuarkInt4Weight,
    UnquantizedConfig,
    UnquantizedWeight,
)
from qload.kernel_formats.repack import find_reader
from qload.layouts import STORED_MINUS_ONE, Packing, Stored
from qload.loader import LayerDescription
from qload.parallel import ALONE
from qload.spec import ActivationScheme, Codes, Weight
from qload.spec.integers import Integers
from qload.verify.blocks import load_output_blocks
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.comparison import equal_bits
from qload.verify.workers import ByteProgress, Workers

T = TypeVar("T")
StoredLayer = LayerDescription | QloadError  # the error of a layer without a description
StoredLayers = Mapping[str, StoredLayer]  # by prefix
EXPERT_AXIS = "E"  # of a layer that holds all experts of a block


@dataclass(frozen=True)
class IntegerTarget:
    """Target format with integer codes.

    `write` packs one layer exactly, or raises RepackError; `needs_codes` if that depends on the codes.
    """

    write: Callable[[Integers], Weight]
    needs_codes: bool = False


def _write_gptq_v1(integers: Integers) -> Weight:
    """Pack as gptq; RepackError for a zero point of 0, which kernels decode in different ways."""
    if integers.span[0] == 0 and integers.convention != STORED_MINUS_ONE:
        reason = "kernels read a zero point of 0, stored minus one, as 2**bits; gptq_v2 stores it unchanged"
        raise RepackError(integers.source, "gptq", reason)
    return GPTQWeight.from_integers(integers, zeros=STORED_MINUS_ONE)


INTEGERS: Mapping[str, IntegerTarget] = {
    "gptq": IntegerTarget(_write_gptq_v1),
    "gptq_v2": IntegerTarget(lambda integers: GPTQWeight.from_integers(integers, zeros=Stored())),
    "awq": IntegerTarget(AWQWeight.from_integers),
    MARLIN_CHECKPOINT: IntegerTarget(MarlinWeight.from_integers),
    "marlin_24": IntegerTarget(Marlin24Weight.from_integers, needs_codes=True),
    "compressed-tensors": IntegerTarget(CTPackWeight.from_integers),
    "quark": IntegerTarget(QuarkInt4Weight.from_integers),
}
GGUF = float4.GGUF
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TARGETS = (*INTEGERS, fp8.NAME, *float4.TARGETS, GGUF, *FLOATS)
OLDER_NAMES = {"marlin": MARLIN_CHECKPOINT}  # elsewhere "marlin" is a kernel order


class IntegersWithoutCodes(Integers):
    """Integers whose codes were not read: writers pack placeholders in their place."""

    @classmethod
    def of(cls, integers: Integers) -> "IntegersWithoutCodes":
        """Return a copy with placeholders in place of codes."""
        return cls(**{field.name: getattr(integers, field.name) for field in fields(integers)})

    def pack_codes(self, name: str, packing: Packing, codes: Tensor | LazyCodes) -> Tensor:
        """Return a placeholder of the packed codes' shape."""
        return torch.zeros((), dtype=torch.int32).expand(packing.shape_of_words(codes.shape))


@dataclass(frozen=True)
class OutputLayer:
    """Type and config of a layer in the new checkpoint, with the item that writes it; None: it is kept."""

    prefix: str
    weight_type: type[Weight]
    config: Any
    K: int
    symmetric: bool = False
    act_order: bool = False
    item: OutputItem | None = None
    activations: ActivationScheme | None = None


OutputLayers = Mapping[str, OutputLayer]  # by prefix


@dataclass(frozen=True)
class ConversionRequest:
    """A source checkpoint, the target format, and the processes that share the work.

    `rounding` permits to round values to the float type of the target. `renames`: the output has the names
    of transformers.
    """

    source: VerifiedCheckpoint
    to: str
    rounding: bool
    workers: Workers
    renames: bool = False

    def convert_layers(
        self, layers: Sequence[StoredLayer], progress: ByteProgress
    ) -> list[OutputLayer | str]:
        """Return each layer in the target format, or the reason of its refusal.

        Processes share the only expensive check, of all values against a narrower float type.
        """
        if self.to not in FLOATS:
            exact = {
                fp8.NAME: self._to_fp8,
                GGUF: self._to_gguf,
                **dict.fromkeys(float4.TARGETS, self._to_float4),
            }
            convert = exact.get(self.to, self._to_integers)
            return self._run_locally(lambda n: _result_or_reason(convert, layers[n]), layers, progress)
        reasons = self.workers.run(
            lambda n: _result_or_reason(self._lost_value, layers[n]), [1] * len(layers), progress
        )

        def convert_exact(n: int) -> OutputLayer | str:
            reason = reasons[n]
            return _result_or_reason(self._to_float, layers[n]) if reason is None else reason

        return self._run_locally(convert_exact, layers, lambda done, total: None)

    def output_name(self, name: str) -> str:
        """Return the name in the output of a layer or tensor; names without another stay."""
        new = transformers_name(self.source.model_config, name) if self.renames else None
        return name if new is None else new

    @property
    def can_round(self) -> bool:
        """Return whether the option `rounding` is off and would make a difference."""
        return not self.rounding and self.to in FLOATS and FLOATS[self.to] != torch.float32

    def other_integer_formats(self, layer: LayerDescription) -> dict[str, OutputLayer]:
        """Return the layer in each other integer format able to represent it, as far as known without codes.

        The layer's own format and config are left out.
        """
        integers = _result_or_reason(self._read_integers, layer)
        if isinstance(integers, str):
            return {}
        others = {}
        for name, target in INTEGERS.items():
            if name != self.to and not target.needs_codes:
                pack = partial(self._pack, integers=integers, target=target)
                other = _result_or_reason(pack, layer)
                current = layer.format.weight_type, layer.format.config
                if not isinstance(other, str) and (other.weight_type, other.config) != current:
                    others[name] = other
        return others

    def _run_locally(
        self, work: Callable[[int], T], layers: Sequence[object], progress: ByteProgress
    ) -> list[T]:
        """Run one layer after another, as some targets need a whole layer in memory."""
        return replace(self.workers, group=ALONE).run(work, [1] * len(layers), progress, 1)

    def _to_integers(self, layer: LayerDescription) -> OutputLayer:
        target = INTEGERS[self.to]
        return self._pack(layer, self._read_integers(layer, target.needs_codes), target)

    def _read_integers(self, layer: LayerDescription, with_codes: bool = False) -> Integers:
        """Read a layer as integers, with placeholders for its codes if these are not needed."""
        if reason := float4.describe_inexpressible(layer, self.to):
            raise RepackError(layer.format.weight_type.format, self.to, reason)
        if layer.format.weight_type is GGUFWeight:  # scales lie between the codes
            with_codes = True
        integers = to_integers(self._load(layer, with_codes))
        return integers if with_codes else IntegersWithoutCodes.of(integers)

    def _pack(self, layer: LayerDescription, integers: Integers, target: IntegerTarget) -> OutputLayer:
        def read_tensors() -> dict[str, Tensor]:
            return weight_tensors(target.write(to_integers(load_layer(self.source, layer.prefix))))

        packed = target.write(integers)
        source_bytes = layer_bytes(self.source.weights, layer)
        item = item_from_tensors(weight_tensors(packed), source_bytes, read_tensors)
        facts = integers.symmetric, not integers.in_order
        return OutputLayer(layer.prefix, type(packed), packed.config, layer.K, *facts, item)

    def _to_fp8(self, layer: LayerDescription) -> OutputLayer:
        fmt = layer.format
        if fmt.weight_type.plain or float4.is_float4(layer):
            if reason := None if fmt.weight_type.plain else float4.why_not(layer, self.to):
                raise RepackError(fmt.weight_type.format, self.to, reason)
            item, config = fp8.plain_item(self.source, layer)
            return OutputLayer(layer.prefix, Fp8Weight, config, layer.K, item=item)
        item, inputs = fp8.fp8_item(self.source, layer), fmt.activations
        return OutputLayer(layer.prefix, fmt.weight_type, fmt.config, layer.K, item=item, activations=inputs)

    def _to_float4(self, layer: LayerDescription) -> OutputLayer:
        reason = float4.why_not(layer, self.to)
        if reason:
            raise RepackError(layer.format.weight_type.format, self.to, reason)

        def read_tensors() -> dict[str, Tensor]:
            return weight_tensors(float4.convert_float4(load_layer(self.source, layer.prefix), self.to))

        item = item_from_tensors(read_tensors(), layer_bytes(self.source.weights, layer), read_tensors)
        target = float4.TARGETS[self.to]
        weight_type = target.stacked or target.weight_type
        return OutputLayer(layer.prefix, weight_type, target.config, layer.K, item=item)

    def _to_gguf(self, layer: LayerDescription) -> OutputLayer:
        """Convert to blocks of ggml: MXFP4, NVFP4, or integers of 4 or 8 bits in groups of 32."""
        if reason := float4.describe_inexpressible(layer, self.to):
            raise RepackError(layer.format.weight_type.format, self.to, reason)

        def write() -> Weight:
            weight = load_layer(self.source, layer.prefix)
            if float4.is_float4(layer):
                return float4.convert_float4(weight, self.to, rounding=self.rounding)
            return GGUFWeight.from_integers(to_integers(weight))

        packed = write()
        source_bytes = layer_bytes(self.source.weights, layer)
        item = item_from_tensors(weight_tensors(packed), source_bytes, lambda: weight_tensors(write()))
        return OutputLayer(layer.prefix, GGUFWeight, packed.config, layer.K, item=item)

    def _load(self, layer: LayerDescription, with_codes: bool) -> Weight:
        """Load the layer, without its codes where its format can be read without them."""
        if not with_codes:
            weight = load_header(self.source, layer)
            reader = find_reader(type(weight), weight.config)
            if reader is None or reader.skippable(weight):
                return weight
        return load_layer(self.source, layer.prefix)

    def _to_float(self, layer: LayerDescription) -> OutputLayer:
        item = dequantize_layer(self.source, layer, FLOATS[self.to])
        return OutputLayer(layer.prefix, UnquantizedWeight, UnquantizedConfig(), layer.K, item=item)

    def why_not_plain(self, layer: LayerDescription) -> str | None:
        """Return why no plain weight can represent a layer, whatever its dtype; None if one can."""
        if EXPERT_AXIS in layer.sizes:
            return "it holds all experts, in an order that is not known for this model type"
        try:
            factors = load_header(self.source, layer).input_factors
        except QloadError as error:
            return str(error)
        if factors is not None:
            return "its inputs are multiplied by factors, which a plain weight cannot hold"
        return None

    def _lost_value(self, layer: LayerDescription) -> str | None:
        """Return the first value out of the float type, as a reason; None if it holds all.

        With `rounding`, only a finite value beyond the largest of the type counts.
        """
        dtype = FLOATS[self.to]
        reason = self.why_not_plain(layer)
        if reason or dtype == torch.float32:
            return reason
        for start, weight in load_output_blocks(self.source.weights, self.source.loader, layer):
            if self.rounding and stays_below(weight, torch.finfo(dtype).max):
                continue
            values = weight.dequantize()
            rounded = values.to(dtype).float()
            if equal_bits(rounded, values):
                continue
            lost = (
                rounded.isinf() & ~values.isinf() if self.rounding else (rounded != values) & ~values.isnan()
            )
            if bool(lost.any()):
                n, k = torch.nonzero(lost)[0].tolist()
                name = str(dtype).removeprefix("torch.")
                value, nearest = f"{values[n, k]:.9g}", f"{rounded[n, k]:.9g}"
                return f"{value} at ({start + n}, {k}) is not a {name}; the nearest is {nearest}"
        return None


def _result_or_reason(convert: Callable[[LayerDescription], T], layer: StoredLayer) -> T | str:
    """Return the result for a layer, or the text of its error."""
    if isinstance(layer, QloadError):
        return str(layer)
    try:
        return convert(layer)
    except RepackError as error:
        return error.reason
    except QloadError as error:
        return str(error)


def stays_below(weight: Weight, limit: float) -> bool:
    """Return whether scales and zero points bound every value but NaN below `limit`, for any codes.

    False if no bound is known, as for plain weights and for formats with a `dequantize` of their own.
    """
    is_own = type(weight).dequantize is not Weight.dequantize or weight.low_rank is not None
    if weight.plain or is_own or not weight.layer.N or weight.layer.transforms is not None:
        return False
    codes = weight.codes()
    if not codes.scales.numel():
        return False
    smallest, largest = codes.scales.abs().aminmax()
    scale = float(largest)
    if codes.divide:
        scale = 1 / float(smallest) if float(smallest) else float("inf")
    scale *= abs(codes.factor) * (1.0 if codes.row_factors is None else float(codes.row_factors.abs().max()))
    offset = 0.0 if codes.offsets is None else float(codes.offsets.abs().max())
    return scale * _largest_code(codes) + offset < limit


def _largest_code(codes: Codes) -> float:
    """Return the largest magnitude of code minus zero point, or of an entry of the lookup table."""
    if codes.lookup is not None:
        return float(codes.lookup.abs().nan_to_num(0, torch.inf).max())  # NaN is ignored
    largest = float(2**codes.bits - 1)
    if codes.zeros is None:
        return largest
    smallest_zero, largest_zero = codes.zeros.aminmax()
    return max(largest - float(smallest_zero), float(largest_zero))
