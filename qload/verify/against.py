"""Comparison of two checkpoints, layer by layer: do both mean the same weights.

A quantized reference has to agree exactly; a plain one exactly after one rounding to its dtype. A plain
reference that agrees in less than half of its nonzero values is the float original, and a quantized layer
lawfully differs from it. Such a layer is wrong only if zeros are as close to the original, if a misreading of
the same tensors (zero points off by one, scales off by a group, another order) or another layer of the
reference is closer, if its scales do not follow the original, or if a few of its words are far off.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from qload.diagnosis.comparison import effective_weight
from qload.errors import QloadError
from qload.errors.rules import rule_texts
from qload.loader import LayerDescription
from qload.spec import TensorSpec, named
from qload.storage import rows
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.comparison import MAX_SPIKE, Comparison, ErrorMap, LayerMap, agree
from qload.verify.diagnose_diff import (
    SideBySide,
    find_known_fault,
    find_misplaced,
    find_misreading,
    find_other_wrapping,
)
from qload.verify.report import Finding, finding_of, new_finding
from qload.verify.run_rules import collect
from qload.verify.values import Values
from qload.verify.workers import ByteProgress, Workers

MIN_AGREEMENT = 0.5  # of the reference: nearer than any layer comes by chance
MAX_THREADS = 4  # each has a block of outputs in several readings in memory
MAX_SCALE = 2.0**30  # no product of a format's scales below it is infinite, so that none is NaN


@dataclass(frozen=True)
class ConfirmedReading:
    """A layer with an ambiguous reading that the reference confirms."""

    layer: str


Item = Finding | str | LayerMap | ConfirmedReading


def check_against(
    checkpoint: VerifiedCheckpoint,
    reference: VerifiedCheckpoint,
    workers: Workers,
    progress: ByteProgress,
    draw: bool,
) -> Iterator[Item]:
    """Yield findings for layers with other weights, and notes on lawful quantization errors.

    `draw`: also yield a map of the errors of each layer, from the same read.
    """
    ours, theirs = _layers(checkpoint), _layers(reference)
    for prefix in sorted(ours.keys() ^ theirs.keys()):
        owner, other = (checkpoint, reference) if prefix in ours else (reference, checkpoint)
        if other.account.hides(prefix):  # stored and unread: a note reports it
            continue
        yield new_finding(
            rule_texts()["against-missing"], prefix, None, f"{prefix}: a layer of {owner.path} only"
        )
    both = sorted(ours.keys() & theirs.keys())
    storage = checkpoint.weights.storage
    sizes = [
        sum(storage.info(ours[prefix].names.full(spec.name)).nbytes for spec in ours[prefix].specs)
        for prefix in both
    ]

    def compare(at: int) -> list[Item]:
        failed: list[Finding] = []
        layer = ours[both[at]]
        compare_one = partial(_compare_layer, checkpoint, layer, reference, theirs, draw)
        items = collect("against", compare_one, failed, layer.prefix)
        return [*items, *failed]

    for items in workers.run(compare, sizes, progress, MAX_THREADS):
        yield from items
    yield from _compare_tensors(checkpoint, reference)
    yield from _missing_tensors(checkpoint, reference, both, ours.keys() == theirs.keys())


def _compare_tensors(checkpoint: VerifiedCheckpoint, reference: VerifiedCheckpoint) -> Iterator[Finding]:
    """Compare tensors outside of layers, such as biases and stacks of floats, in both checkpoints."""
    ours, theirs = ({*side.account.report.used} - side.specs.keys() for side in (checkpoint, reference))
    for name in sorted(ours & theirs):
        finding = _compare_tensor(checkpoint, reference, name)
        if finding is not None:
            yield finding


def _missing_tensors(
    checkpoint: VerifiedCheckpoint, reference: VerifiedCheckpoint, prefixes: Sequence[str], equal: bool
) -> Iterator[Finding]:
    """Yield a finding for each tensor outside of layers that one side alone has, unless it is zero.

    These are biases of layers of both sides, the `prefixes`. If both have `equal` layers, they are also other
    tensors of the model's table. Programs add biases of zeros.
    """
    biases = {named(prefix, "bias") for prefix in prefixes}
    for owner, other in ((checkpoint, reference), (reference, checkpoint)):
        storage, architecture = owner.weights.storage, owner.architecture
        alone = {*owner.account.report.used} - owner.specs.keys() - {*other.weights.storage.keys()}
        for name in sorted(alone):
            known = equal and architecture is not None and architecture.find(name) is not None
            if (name in biases or known) and any(bool(run.any()) for _, run in rows(storage, name)):
                message = f"{name}: a tensor of {owner.path} only"
                yield new_finding(rule_texts()["against-missing"], name, None, message)


def _compare_tensor(
    checkpoint: VerifiedCheckpoint, reference: VerifiedCheckpoint, name: str
) -> Finding | None:
    """Return the finding for a tensor that differs after one rounding to the narrower of both dtypes."""
    storages = checkpoint.weights.storage, reference.weights.storage
    ours, theirs = (storage.info(name) for storage in storages)
    if ours.shape != theirs.shape:
        message = f"{name}: shape is {ours.shape}, the reference has {theirs.shape}"
        return new_finding(rule_texts()["against-shape"], name, ours.file, message)
    narrow = min(ours.dtype, theirs.dtype, key=lambda dtype: (dtype.itemsize, str(dtype)))
    count, first = 0, None
    for (start, got), (_, want) in zip(*(rows(storage, name) for storage in storages), strict=True):
        value, other = got.to(narrow), want.to(narrow)
        apart = value != other
        if value.is_floating_point():
            apart &= ~(value.isnan() & other.isnan())
        if bool(apart.any()) and first is None:
            row, *rest = apart.nonzero()[0].tolist()
            first = (start + row, *rest), float(got[(row, *rest)]), float(want[(row, *rest)])
        count += int(apart.sum())
    if first is None:
        return None
    place, got_value, want_value = first
    message = (
        f"{name}: differs from the reference first at {place}: {got_value:g}, the reference has "
        f"{want_value:g}; {count} of {math.prod(ours.shape)} differ"
    )
    return new_finding(rule_texts()["against-value"], name, ours.file, message)


def _layers(checkpoint: VerifiedCheckpoint) -> dict[str, LayerDescription]:
    return {layer.prefix: layer for layer in checkpoint.described()}


def _compare_layer(
    checkpoint: VerifiedCheckpoint,
    ours: LayerDescription,
    reference: VerifiedCheckpoint,
    layers: Mapping[str, LayerDescription],
    draw: bool,
) -> Iterator[Item]:
    name, theirs = ours.prefix, layers[ours.prefix]
    if (ours.N, ours.K) != (theirs.N, theirs.K):
        shapes = f"({ours.N}, {ours.K}), the reference ({theirs.N}, {theirs.K})"
        yield new_finding(rule_texts()["against-shape"], name, None, f"{name}: (N, K) is {shapes}")
        return
    pair = SideBySide(checkpoint, ours, reference, theirs)
    try:
        error_map = ErrorMap(ours.N, ours.K) if draw and _is_matrix(ours) else None
        comparison = Comparison() if has_equal_bytes(pair) else _compare_blocks(pair, error_map)
        if error_map is not None:
            yield LayerMap(name, error_map.text())
        if comparison.first is None:
            if ours.format.config.doubt:
                yield ConfirmedReading(name)
            return
        plain = theirs.format.weight_type.plain and not ours.format.weight_type.plain
        lawful = plain and comparison.original
        cause = _find_cause(pair, comparison, layers, plain=plain, lawful=lawful)
    except QloadError as error:
        yield finding_of(error)
        return
    items = list(_result(name, comparison, cause, lawful))
    yield from items
    if ours.format.config.doubt and not any(isinstance(item, Finding) for item in items):
        yield ConfirmedReading(name)


def _find_cause(
    pair: SideBySide,
    comparison: Comparison,
    layers: Mapping[str, LayerDescription],
    *,
    plain: bool,
    lawful: bool,
) -> str | None:
    """Return in words the mistake behind a difference; `lawful`: the reference is the float original."""
    run = comparison.worst_run if lawful else comparison.first_run
    mistake = comparison.fit.mistake() if lawful else None
    near = math.inf if lawful else plain * MIN_AGREEMENT
    if mistake is not None:  # then every misreading of the scales comes a little closer
        near = comparison.distance.relative * MIN_AGREEMENT
    cause = find_other_wrapping(pair) if pair.layer.format.config.doubt else None
    cause = cause or find_misreading(pair, run, near)
    cause = cause or find_misplaced(pair, run, layers) or mistake
    return find_known_fault(pair, run) if cause is None and not lawful else cause


def _is_matrix(layer: LayerDescription) -> bool:
    return "K" in layer.sizes and "E" not in layer.sizes  # outputs and inputs, and no experts


def _compare_blocks(pair: SideBySide, error_map: ErrorMap | None) -> Comparison:
    """Compare all blocks; a layer that agrees takes a shorter way if no map is drawn."""
    finite, comparison = is_finite(pair.checkpoint, pair.layer), Comparison()
    if error_map is None and all(agree(weight, other, finite=finite) for _, weight, other in pair.runs()):
        return comparison
    for start, weight, other in pair.runs():
        comparison.add(start, weight, other)
        if error_map is not None:
            error_map.add(start, effective_weight(weight), effective_weight(other))
    return comparison


def _result(name: str, comparison: Comparison, cause: str | None, lawful: bool) -> Iterator[Finding | str]:
    assert comparison.first is not None
    place, got, want = comparison.first
    letters = ", ".join("enk"[-len(place) :])
    where = (
        f"{name}: differs from the reference first at ({letters}) = {place}: {got:g}, "
        f"the reference has {want:g}; "
        f"{comparison.differing} of {comparison.total} differ"
    )
    spiky = lawful and comparison.spike_ratio > MAX_SPIKE
    if lawful and cause is None and not spiky:
        yield f"{name}: relative error {comparison.distance.relative:.3f} to a plain reference"
        return
    if cause is None and spiky:
        n, k = comparison.spike[1]
        cause = (
            f"a word at (n, k) = ({n}, {k}) is off by {comparison.spike[0] ** 0.5:.1f} steps, the layer by "
            f"{(comparison.steps / comparison.total) ** 0.5:.2f}: a few words are damaged"
        )
    yield new_finding(rule_texts()["against-value"], name, None, f"{where}\n{cause}" if cause else where)


def has_equal_bytes(pair: SideBySide) -> bool:
    """Return whether both layers are stored alike, in equal bytes of finite values; NaN equals nothing."""
    return is_finite(pair.checkpoint, pair.layer) and pair.has_equal_bytes()


def is_finite(checkpoint: VerifiedCheckpoint, layer: LayerDescription) -> bool:
    """Return whether a layer was measured, and no NaN or infinity can come from its tensors."""
    values: Values | None = vars(checkpoint).get("values")
    if values is None or not (layer.format.weight_type.plain or layer.prefix in values.statistics):
        return False
    return all(_has_finite_products(values, layer, spec) for spec in layer.specs)


def _has_finite_products(values: Values, layer: LayerDescription, spec: TensorSpec) -> bool:
    numbers = values.numbers.get(layer.names.full(spec.name))
    if numbers is None:
        return not layer.dtypes[spec.name].is_floating_point
    least = spec.divides and (numbers.zeros > 0 or numbers.least < 1 / MAX_SCALE)
    return numbers.finite and numbers.largest < MAX_SCALE and not least
