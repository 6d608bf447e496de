"""Diagnosis of a layer that differs from its reference: misreadings, misplaced layers, and known faults.

A misreading is a candidate mistake of the writer or reader: zero points off by one, scales off by a group,
another order of codes. It is tried on one block of outputs first, and then on the whole layer. A misplaced
layer is stored under another name in the reference, or transposed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

import torch
from torch import Tensor

from qload.diagnosis.comparison import apply_input_factors, effective_weight
from qload.diagnosis.diagnosis import explain_errors
from qload.diagnosis.reading_faults import faults_in_files
from qload.errors import QloadError
from qload.formats import GPTQWeight
from qload.layouts import gptq
from qload.loader import LayerDescription, Part
from qload.spec import Codes, Weight
from qload.spec.zero_point_evidence import FIELDS, WHOLE
from qload.verify.blocks import WindowSource, load_output_blocks, pieces
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.comparison import MATRIX_AXES, Distance, differ, equal_bits

MAX_READINGS = 3  # readings of one block that are tried on the whole layer
WORD_BITS = 32
MAX_LAYERS = 256  # layers of the reference that are compared with one layer
MAX_DISTANCE = (
    0.5  # of the distance to its own reference: random layers are as far from each other as from zeros
)

# A block of outputs: ours with a mistake taken back, and the corresponding part of the reference.
Pair = tuple[Tensor, Tensor]
Reading = Callable[[], Pair]


@dataclass(frozen=True)
class SideBySide:
    """A layer of a checkpoint, and its counterpart in the reference."""

    checkpoint: VerifiedCheckpoint
    layer: LayerDescription
    reference: VerifiedCheckpoint
    other: LayerDescription

    def runs(self) -> Iterator[tuple[int, Weight, Weight]]:
        """Yield blocks of outputs: the first output, our weight, and the reference's."""
        for start, weight in load_output_blocks(self.checkpoint.weights, self.checkpoint.loader, self.layer):
            run = (start, start + weight.layer.N)
            yield start, weight, self._load_reference(run)

    def load(self, run: tuple[int, int]) -> tuple[Weight, Weight]:
        """Load the outputs `run`: our weight, and the reference's."""
        ours = self.checkpoint.loader.load(self._ours, [Part(self.layer.prefix, *run)], None)
        return ours, self._load_reference(run)

    def has_equal_bytes(self) -> bool:
        """Return whether both layers are stored alike, in equal bytes and transforms."""
        ours, theirs = self.layer, self.other
        if ours.format != theirs.format or ours.sizes != theirs.sizes or ours.dtypes != theirs.dtypes:
            return False
        if ours.transforms != theirs.transforms:
            return False
        first, second = self.checkpoint.weights.storage, self.reference.weights.storage
        names = [(ours.names.full(spec.name), theirs.names.full(spec.name)) for spec in ours.specs]
        return all(
            first.info(name).shape == second.info(other).shape
            and all(
                equal_bits(*both) for both in zip(pieces(first, name), pieces(second, other), strict=True)
            )
            for name, other in names
        )

    def _load_reference(self, run: tuple[int, int]) -> Weight:
        return self.reference.loader.load(self._theirs, [Part(self.other.prefix, *run)], None)

    @cached_property
    def _ours(self) -> WindowSource:
        return WindowSource(self.checkpoint.weights)

    @cached_property
    def _theirs(self) -> WindowSource:
        return WindowSource(self.reference.weights)


def find_misreading(pair: SideBySide, run: tuple[int, int], near: float) -> str | None:
    """Return in words the mistake without which the layer agrees with the reference, or comes closer.

    `run`: outputs to try first. `near`: relative distance below which coming closer is enough; 0 for a
    quantized reference, which agrees or does not.
    """
    weight, reference = pair.load(run)
    every = _all_readings(weight, reference)
    tried = {name: Distance() for name in every}
    _add_distances(tried, every, reference)
    stored = tried.pop("").relative
    names = [name for name in _by_distance(tried) if tried[name].exact or tried[name].relative < stored]
    closest = names[:MAX_READINGS]
    if not closest:
        return None
    on_layer = {name: Distance() for name in ("", *closest)}
    for _, weight, reference in pair.runs():
        _add_distances(on_layer, _all_readings(weight, reference), reference)
    best = next(name for name in _by_distance(on_layer) if name)
    if on_layer[best].exact:
        return f"read with {best}, it agrees"
    closer = on_layer[best].relative < min(near, on_layer[""].relative)
    return f"read with {best}, it comes closer" if closer else None


def find_other_wrapping(pair: SideBySide) -> str | None:
    """Return the other reading of zero points of 0 in words if it is closer to the reference; else None."""
    ours, other, name = Distance(), Distance(), ""
    for _, weight, reference in pair.runs():
        want, got = effective_weight(reference), effective_weight(weight)
        ours.add(got, want, differ(got, want, reference))
        for words, make_codes in wrapped_readings(weight, weight.codes()):
            got, name = apply_input_factors(weight, make_codes().dequantize().reshape(want.shape)), words
        other.add(got, want, differ(got, want, reference))
    closer = name and other.relative < ours.relative
    return f"read with {name}, it {'agrees' if other.exact else 'comes closer'}" if closer else None


def find_known_fault(pair: SideBySide, run: tuple[int, int]) -> str | None:
    """Return in words the known fault that turns the outputs `run` of the reference into ours."""
    weight, reference = pair.load(run)
    want, got = effective_weight(reference), effective_weight(weight)
    if want.ndim != MATRIX_AXES:
        return None
    return explain_errors(want, got, None if reference.plain else reference, run[0])


def _all_readings(weight: Weight, reference: Weight) -> dict[str, Reading]:
    """Return the stored reading under the name "", and all misreadings."""
    return {
        "": lambda: (effective_weight(weight), effective_weight(reference)),
        **misreadings(weight, reference),
    }


def _add_distances(into: Mapping[str, Distance], readings: Mapping[str, Reading], reference: Weight) -> None:
    for name, distance in into.items():  # a block too short for a reading counts as it is stored
        got, want = readings.get(name, readings[""])()
        distance.add(got, want, differ(got, want, reference))


def _by_distance(tried: Mapping[str, Distance]) -> Iterable[str]:
    return sorted(tried, key=lambda name: (not tried[name].exact, tried[name].relative))


def misreadings(weight: Weight, reference: Weight) -> dict[str, Reading]:
    """Return mistake in words -> function for both (n, k) float32 values, with the mistake taken back.

    `weight` and `reference` are the same outputs of a layer and of its counterpart.
    """
    want = effective_weight(reference)
    if weight.format == "unquantized":
        return dict(_shifted_outputs(effective_weight(weight), want))
    codes = weight.codes()
    readings = {
        misreading.words: _reading(weight, misreading.read, want) for misreading in faults_in_files(weight)
    }
    readings |= {mistake: _reading(weight, make, want) for mistake, make in wrapped_readings(weight, codes)}
    if reference.format == weight.format:
        other = reference.codes()
        readings |= {
            mistake: _reading(weight, make, want) for mistake, make in _exchanged_parts(codes, other)
        }
    return {
        **readings,
        **dict(_shifted_words(weight, codes, want)),
        **dict(_shifted_outputs(effective_weight(weight), want)),
    }


def wrapped_readings(weight: Weight, codes: Codes) -> Iterator[tuple[str, Callable[[], Codes]]]:
    """Yield a GPTQ weight in the other reading of zero points of 0, if that changes any."""
    if not isinstance(weight, GPTQWeight) or codes.zeros is None:
        return
    for ours, other, words in (
        (WHOLE, FIELDS, "zero points minus one in each field by itself"),
        (FIELDS, WHOLE, "zero points minus one in whole words"),
    ):
        if weight.config.zeros == ours:
            zeros = other.read(weight.qzeros, gptq.columns(weight.config.bits)).T
            if _differ(codes.zeros, zeros):
                yield words, lambda: replace(codes, zeros=zeros)  # noqa: B023 - at most one is yielded


def _reading(weight: Weight, make_codes: Callable[[], Codes], want: Tensor) -> Reading:
    return lambda: (apply_input_factors(weight, make_codes().dequantize().reshape(want.shape)), want)


def _exchanged_parts(codes: Codes, other: Codes) -> Iterator[tuple[str, Callable[[], Codes]]]:
    """Yield our codes with one of the reference's scales, zero points or groups, if these differ."""
    if _differ(codes.scales, other.scales):
        yield "the reference's scales", lambda: replace(codes, scales=other.scales)
    if _differ(codes.zeros, other.zeros):
        yield "the reference's zero points", lambda: replace(codes, zeros=other.zeros)
    if _differ(codes.k_group, other.k_group) and codes.scales.shape == other.scales.shape:
        yield "the reference's groups (g_idx)", lambda: replace(codes, k_group=other.k_group)


def _differ(ours: Tensor | None, theirs: Tensor | None) -> bool:
    return ours is not None and theirs is not None and ours.shape == theirs.shape and not ours.equal(theirs)


def _shifted_words(weight: Weight, codes: Codes, want: Tensor) -> Iterator[tuple[str, Reading]]:
    """Yield codes shifted by one word along K, or by one output, under unshifted scales."""
    if want.ndim != MATRIX_AXES:
        return
    for axis, letter, step in ((1, "K", WORD_BITS // codes.bits), (0, "N", 1)):
        for sign, direction in ((-1, "back"), (1, "on")):
            if codes.codes.shape[axis] > step:
                reading = _shifted(weight, codes, want, axis, sign * step)
                yield f"codes {step} {direction} along {letter}", reading


def _shifted(weight: Weight, codes: Codes, want: Tensor, axis: int, step: int) -> Reading:
    """Return a reading of shifted codes, without the values from beyond the block."""

    def read() -> Pair:
        rolled = replace(codes, codes=codes.plain().roll(step, axis)).dequantize().reshape(want.shape)
        moved = apply_input_factors(weight, rolled)
        size = want.shape[axis] - abs(step)
        start = max(0, step)
        return moved.narrow(axis, start, size), want.narrow(axis, start, size)

    return read


def _shifted_outputs(got: Tensor, want: Tensor) -> Iterator[tuple[str, Reading]]:
    """Yield whole outputs, shifted by one."""
    if got.ndim == MATRIX_AXES and got.shape[0] > 1:
        yield "outputs one back", lambda: (got[1:], want[:-1])
        yield "outputs one on", lambda: (got[:-1], want[1:])


def find_misplaced(
    pair: SideBySide, run: tuple[int, int], layers: Mapping[str, LayerDescription]
) -> str | None:
    """Return in words the place of our outputs `run` in the reference; None if they are nowhere."""
    weight, theirs_here = pair.load(run)
    reference, counterpart = pair.reference, pair.other
    got = effective_weight(weight)
    base = _distance(got, theirs_here)
    for other in _candidates(counterpart, layers):
        theirs = _load(reference, other, run)
        if theirs is not None and _fits(got, theirs, base):
            return f"it is the reference's {other.prefix}"
    if counterpart.N == counterpart.K and _fits(got, _transposed(reference, counterpart, run), base):
        return "it is the reference transposed"
    return None


def _candidates(
    counterpart: LayerDescription, layers: Mapping[str, LayerDescription]
) -> Iterator[LayerDescription]:
    """Yield layers of the same shape: first of the same block, then of the same name in other blocks."""
    block, _, name = counterpart.prefix.rpartition(".")
    same_shape = [
        other
        for other in layers.values()
        if other.prefix != counterpart.prefix
        and other.sizes == counterpart.sizes
        and (other.N, other.K) == (counterpart.N, counterpart.K)
    ]

    def distance(other: LayerDescription) -> tuple[bool, bool, str]:
        parent, _, last = other.prefix.rpartition(".")
        return parent != block, last != name, other.prefix

    yield from sorted(same_shape, key=distance)[:MAX_LAYERS]


def _load(reference: VerifiedCheckpoint, layer: LayerDescription, run: tuple[int, int]) -> Weight | None:
    try:
        return reference.loader.load(reference.weights, [Part(layer.prefix, *run)], None)
    except QloadError:
        return None  # another finding reports it, or its blocks begin elsewhere


def _fits(got: Tensor, theirs: Weight | Tensor | None, base: float) -> bool:
    if theirs is None:
        return False
    if isinstance(theirs, Weight) and not differ(got, effective_weight(theirs), theirs).any():
        return True
    return isfinite(base) and _distance(got, theirs) < MAX_DISTANCE * base  # every number is nearer than NaN


def _distance(got: Tensor, theirs: Weight | Tensor) -> float:
    want = effective_weight(theirs) if isinstance(theirs, Weight) else theirs
    if want.shape != got.shape:
        return float("inf")
    far = float((got - want).square().sum(dtype=torch.float64))
    return far if far == far else float("inf")


def _transposed(
    reference: VerifiedCheckpoint, layer: LayerDescription, run: tuple[int, int]
) -> Tensor | None:
    """Return the inputs `run` of all outputs, as outputs of all inputs."""
    try:
        columns = [
            effective_weight(block)[:, run[0] : run[1]].T
            for _, block in load_output_blocks(reference.weights, reference.loader, layer)
        ]
    except QloadError:
        return None
    return torch.cat(columns, 1)
