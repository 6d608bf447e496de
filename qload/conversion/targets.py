"""Conversion targets, and the check that a target can represent a layer exactly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from qload.conversion import fp8
from qload.conversion.output_tensors import Item, dequantized, meaning, rewritten
from qload.errors import QloadError, RepackError
from qload.formats import Fp8Weight, UnquantizedConfig, UnquantizedWeight
from qload.kernel_formats import awq, compressed_tensors, gptq, marlin_24, marlin_checkpoint
from qload.kernel_formats.plain_integers import Integers
from qload.kernel_formats.repack import READERS
from qload.layouts import STORED_MINUS_ONE, Stored
from qload.listing import MARLIN_CHECKPOINT
from qload.loader import LayerDescription, Part
from qload.parallel import ALONE
from qload.repacking.header_only import HeaderOnlySource
from qload.spec import ActivationScheme, Codes, Weight
from qload.verify.chunks import outputs
from qload.verify.comparison import equal_bits
from qload.verify.crew import Crew, Tell
from qload.verify.subject import Subject


@dataclass(frozen=True)
class IntegerTarget:
    """A format of integer codes: what writes one layer of it, exactly or not at all.

    `looks_at_codes`: to decide what it refuses.
    """

    write: Callable[[Integers], Weight]
    looks_at_codes: bool = False


def _minus_one(integers: Integers) -> Weight:
    """A zero point of 0, which is all ones once 1 is taken from it, has other readings in kernels."""
    if integers.span[0] == 0 and integers.convention != STORED_MINUS_ONE:
        reason = "kernels read a zero point of 0, stored minus one, as 2**bits; gptq_v2 stores it as it is"
        raise RepackError(integers.source, "gptq", reason)
    return gptq.from_integers(integers, STORED_MINUS_ONE)


INTEGERS: Mapping[str, IntegerTarget] = {
    "gptq": IntegerTarget(_minus_one),
    "gptq_v2": IntegerTarget(lambda integers: gptq.from_integers(integers, Stored())),
    "awq": IntegerTarget(awq.from_integers),
    MARLIN_CHECKPOINT: IntegerTarget(marlin_checkpoint.from_integers),
    "marlin_24": IntegerTarget(marlin_24.from_integers, looks_at_codes=True),
    "compressed-tensors": IntegerTarget(compressed_tensors.from_integers),
}
FLOATS: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
TARGETS = (*INTEGERS, "fp8", *FLOATS)
OLDER_NAMES = {"marlin": MARLIN_CHECKPOINT}  # of targets: "marlin" is a kernel order elsewhere


class Unpacked(Integers):
    """Integers whose codes were not read: a writer makes all of a weight of them but its words."""

    @classmethod
    def of(cls, integers: Integers) -> "Unpacked":
        """The same, and no code of it will be looked at."""
        return cls(**{each.name: getattr(integers, each.name) for each in fields(integers)})

    def _write_tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype, write: object) -> Tensor:
        return torch.zeros((), dtype=dtype).expand(tuple(shape))


def stays_below(weight: Weight, limit: float) -> bool:
    """Whether no value of a quantized weight but NaN can be as far from zero as `limit`, whatever its codes.

    False says nothing: codes may be smaller than they could be, and some weights mean more than their codes.
    """
    if weight.plain or type(weight).dequantize is not Weight.dequantize or not weight.layer.N:
        return False
    codes = weight.codes()
    if not codes.scales.numel():
        return False
    least, most = codes.scales.abs().aminmax()
    scale = float(most)
    if codes.divide:
        scale = 1 / float(least) if float(least) else float("inf")
    return scale * abs(codes.factor) * _farthest(codes) < limit


def _farthest(codes: Codes) -> float:
    """The largest that a code less its zero point can be, or that it stands for."""
    if codes.lookup is not None:
        return float(codes.lookup.abs().nan_to_num(0, torch.inf).max())  # NaN is at no distance
    largest = float(2**codes.bits - 1)
    if codes.zeros is None:
        return largest
    least, most = codes.zeros.aminmax()
    return max(largest - float(least), float(most))


T = TypeVar("T")
EXPERTS = "E"  # an axis of a layer that holds all experts


@dataclass(frozen=True)
class StoredLayer:
    """A layer as it will be stored: its type and config, and what writes it; `item` None: it is copied."""

    prefix: str
    weight_type: type[Weight]
    config: Any
    K: int
    symmetric: bool = False
    act_order: bool = False
    item: Item | None = None
    inputs: ActivationScheme | None = None


@dataclass(frozen=True)
class AskedTarget:
    """A target, whether values may be rounded to its float type, and who asks."""

    subject: Subject
    to: str
    rounding: bool
    crew: Crew

    def answers(self, layers: Sequence[LayerDescription | QloadError], tell: Tell) -> list[StoredLayer | str]:
        """What each layer becomes, or why the target cannot say it.

        Processes share what looks at all values, which is what narrower floats take; the rest is little.
        """
        sizes = [1] * len(layers)
        if self.to not in FLOATS:
            return self._here(lambda at: _told(self._made, layers[at]), sizes, tell)
        lost = self.crew.share_out(lambda at: _told(self._lost, layers[at]), sizes, tell)

        def answer(at: int) -> StoredLayer | str:
            reason = lost[at]
            return _told(self._plain, layers[at]) if reason is None else reason

        return self._here(answer, sizes, _nothing)

    @property
    def can_round(self) -> bool:
        """Whether rounding was not asked for and would help."""
        return not self.rounding and self.to in FLOATS and FLOATS[self.to] != torch.float32

    def as_other_integers(self, layer: LayerDescription) -> dict[str, StoredLayer]:
        """What a layer becomes in each format of integers but its own that needs no look at codes."""
        names = [name for name, target in INTEGERS.items() if name != self.to and not target.looks_at_codes]
        own = layer.format.weight_type, layer.format.config
        made = {name: _told(replace(self, to=name)._integers, layer) for name in names}
        return {
            name: stored
            for name, stored in made.items()
            if not isinstance(stored, str) and (stored.weight_type, stored.config) != own
        }

    def _here(
        self, answer: Callable[[int], StoredLayer | str], sizes: Sequence[int], tell: Tell
    ) -> list[StoredLayer | str]:
        """In this process, one after another: of some targets a whole layer is in memory."""
        return replace(self.crew, group=ALONE).share_out(answer, sizes, tell, 1)

    def _made(self, layer: LayerDescription) -> StoredLayer | str:
        return self._fp8(layer) if self.to == fp8.NAME else self._integers(layer)

    def _integers(self, layer: LayerDescription) -> StoredLayer | str:
        if layer.format.activations is not None:
            return f"its inputs are quantized ({layer.format.activations}), which {self.to} does not say"
        target, weights = INTEGERS[self.to], self.subject.weights
        assert weights is not None
        integers = meaning(self._facts(layer, target.looks_at_codes))
        made = target.write(integers if target.looks_at_codes else Unpacked.of(integers))
        item = rewritten(weights, self.subject.loader, layer, made, target.write)
        facts = integers.symmetric, not integers.in_order
        return StoredLayer(layer.prefix, type(made), made.config, layer.K, *facts, item)

    def _fp8(self, layer: LayerDescription) -> StoredLayer:
        weights, loader = self.subject.weights, self.subject.loader
        assert weights is not None
        fmt = layer.format
        if fmt.weight_type.plain:
            item, config = fp8.plain_item(weights, loader, layer)
            return StoredLayer(layer.prefix, Fp8Weight, config, layer.K, item=item)
        item = fp8.fp8_item(weights, loader, layer)
        return StoredLayer(
            layer.prefix, fmt.weight_type, fmt.config, layer.K, item=item, inputs=fmt.activations
        )

    def _facts(self, layer: LayerDescription, whole: bool) -> Weight:
        """The layer without its codes, unless these decide too."""
        weights, loader = self.subject.weights, self.subject.loader
        assert weights is not None
        parts = [Part(layer.prefix)]
        if not whole:
            weight = loader.load(HeaderOnlySource.without_codes(weights, layer), parts, None)
            reader = READERS.get(type(weight))
            if reader is None or reader.skippable(weight):
                return weight
        return loader.load(weights, parts, None)

    def _plain(self, layer: LayerDescription) -> StoredLayer:
        weights, loader = self.subject.weights, self.subject.loader
        assert weights is not None
        item = dequantized(weights, loader, layer, FLOATS[self.to])
        return StoredLayer(layer.prefix, UnquantizedWeight, UnquantizedConfig(), layer.K, item=item)

    def _lost(self, layer: LayerDescription) -> str | None:
        """The first value that a narrower type has not; where rounding is meant, that it has none near."""
        weights, dtype = self.subject.weights, FLOATS[self.to]
        assert weights is not None
        if EXPERTS in layer.sizes:
            return "it holds all experts, and how these lie is not known of this type of model"
        if dtype == torch.float32:
            return None
        for start, weight in outputs(weights, self.subject.loader, layer):
            if weight.input_factors is not None:
                return "its inputs are multiplied by factors, for which a plain weight has no place"
            if self.rounding and stays_below(weight, torch.finfo(dtype).max):
                continue
            values = weight.dequantize()
            near = values.to(dtype).float()
            if equal_bits(near, values):
                continue
            lost = near.isinf() & ~values.isinf() if self.rounding else (near != values) & ~values.isnan()
            if bool(lost.any()):
                n, k = torch.nonzero(lost)[0].tolist()
                name = str(dtype).removeprefix("torch.")
                return f"{values[n, k]:.9g} at ({start + n}, {k}) is no {name}: nearest is {near[n, k]:.9g}"
        return None


def _told(ask: Callable[[LayerDescription], T], layer: LayerDescription | QloadError) -> T | str:
    """An answer about a layer, or why there is none."""
    if isinstance(layer, QloadError):
        return str(layer)
    try:
        return ask(layer)
    except RepackError as error:
        return error.reason
    except QloadError as error:
        return str(error)


def _nothing(done: int, total: int) -> None:
    """Nobody is told."""
