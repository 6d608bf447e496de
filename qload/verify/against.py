"""Layer by layer: do two checkpoints mean the same weights?

A quantized reference has to agree exactly; a plain one exactly after one rounding to its dtype. A plain
reference that agrees in less than half of what is not zero is taken for the float original, from which a
quantized layer lawfully differs: then the layer is wrong only if it is no closer to the original than zeros
are, if another reading of the same tensors (zero points off by one, scales off by a group, another order)
or another layer of the reference is closer, if its scales do not follow the original, or if a few of its
words are far off.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from qload.diagnosis.dequantized import meant
from qload.errors import QloadError
from qload.loader import LayerDescription
from qload.storage import rows
from qload.verify.causes import SideBySide, known_fault, misreading, other_wrapping
from qload.verify.comparison import SPIKE, Comparison, agree
from qload.verify.crew import Crew, Tell
from qload.verify.elsewhere import found_elsewhere
from qload.verify.error_map import ErrorMap, LayerMap
from qload.verify.judge import collected
from qload.verify.report import Finding, finding_of
from qload.verify.same import is_finite, same
from qload.verify.subject import Subject

MISSING, SHAPE, VALUE = "against-missing", "against-shape", "against-value"
HALF = 0.5  # of the reference: nearer than any layer comes by chance
THREADS = 4  # each has a run of outputs in several readings in memory


@dataclass(frozen=True)
class ConfirmedReading:
    """A layer with an ambiguous reading that the reference confirms."""

    layer: str


Item = Finding | str | LayerMap | ConfirmedReading


def check(
    subject: Subject, reference: Subject, crew: Crew, tell: Tell, drawing: bool = False
) -> Iterator[Item]:
    """Findings for layers that mean something else; notes for lawful quantization errors.

    `drawing`: for each layer the map of its errors too, of the same read.
    """
    assert subject.weights is not None
    ours, theirs = _layers(subject), _layers(reference)
    for prefix in sorted(ours.keys() ^ theirs.keys()):
        here, other = (subject, reference) if prefix in ours else (reference, subject)
        if other.account.hides(prefix):  # stored and unread: a note reports it
            continue
        where = here.path
        yield Finding(MISSING, "error", prefix, None, f"{prefix}: a layer of {where} only")
    both = sorted(ours.keys() & theirs.keys())
    storage = subject.weights.storage
    sizes = [
        sum(storage.info(ours[prefix].names.full(spec.name)).nbytes for spec in ours[prefix].specs)
        for prefix in both
    ]

    def compared(at: int) -> list[Item]:
        failed: list[Finding] = []
        layer = ours[both[at]]
        compare = partial(_layer, subject, layer, reference, theirs, drawing)
        items = collected("against", compare, failed, layer.prefix)
        return [*items, *failed]

    for told in crew.share_out(compared, sizes, tell, THREADS):
        yield from told
    yield from _tensors(subject, reference)


def _tensors(subject: Subject, reference: Subject) -> Iterator[Finding]:
    """Compare tensors outside of layers, such as biases and stacks of floats, in both checkpoints."""
    ours, theirs = (
        {*checkpoint.account.report.used} - checkpoint.specs.keys() for checkpoint in (subject, reference)
    )
    for name in sorted(ours & theirs):
        finding = _differing(subject, reference, name)
        if finding is not None:
            yield finding


def _differing(subject: Subject, reference: Subject, name: str) -> Finding | None:
    """Finding for a tensor that differs after one rounding to the narrower of both dtypes."""
    assert subject.weights is not None
    assert reference.weights is not None
    storages = subject.weights.storage, reference.weights.storage
    ours, theirs = (storage.info(name) for storage in storages)
    if ours.shape != theirs.shape:
        message = f"{name}: shape is {ours.shape}, the reference has {theirs.shape}"
        return Finding(SHAPE, "error", name, ours.file, message)
    narrow = min(ours.dtype, theirs.dtype, key=lambda dtype: (dtype.itemsize, str(dtype)))
    count, first = 0, None
    for (start, got), (_, want) in zip(*(rows(storage, name) for storage in storages), strict=True):
        value, other = got.to(narrow), want.to(narrow)
        apart = (
            (value != other) & ~(value.isnan() & other.isnan())
            if value.is_floating_point()
            else value != other
        )
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
    return Finding(VALUE, "error", name, ours.file, message)


def _layers(subject: Subject) -> dict[str, LayerDescription]:
    return {layer.prefix: layer for layer in subject.described()}


def _layer(
    subject: Subject,
    ours: LayerDescription,
    reference: Subject,
    layers: Mapping[str, LayerDescription],
    drawing: bool,
) -> Iterator[Item]:
    name, theirs = ours.prefix, layers[ours.prefix]
    if (ours.N, ours.K) != (theirs.N, theirs.K):
        shapes = f"({ours.N}, {ours.K}), the reference ({theirs.N}, {theirs.K})"
        yield Finding(SHAPE, "error", name, None, f"{name}: (N, K) is {shapes}")
        return
    pair = SideBySide(subject, ours, reference, theirs)
    try:
        drawn = ErrorMap(ours.N, ours.K) if drawing and _is_matrix(ours) else None
        found = Comparison() if same(pair) else _compared(pair, drawn)
        if drawn is not None:
            yield LayerMap(name, drawn.text())
        if found.first is None:
            if ours.format.config.doubt:
                yield ConfirmedReading(name)
            return
        plain = theirs.format.weight_type.plain and not ours.format.weight_type.plain
        lawful = plain and found.original
        run = found.worst_run if lawful else found.first_run
        elsewhere = partial(found_elsewhere, pair.load(run)[0], run, reference, theirs, layers)
        mistake = found.fit.mistake() if lawful else None
        near = math.inf if lawful else plain * HALF
        if mistake is not None:  # which every other reading of the scales is a little closer than
            near = found.distance.relative * HALF
        doubtful = other_wrapping(pair) if ours.format.config.doubt else None
        cause = doubtful or misreading(pair, run, near) or elsewhere() or mistake
        if cause is None and not lawful:
            cause = known_fault(pair, run)
    except QloadError as error:
        yield finding_of(error)
        return
    items = list(_verdict(name, found, cause, lawful))
    yield from items
    if ours.format.config.doubt and not any(isinstance(each, Finding) for each in items):
        yield ConfirmedReading(name)


def _is_matrix(layer: LayerDescription) -> bool:
    return "K" in layer.sizes and "E" not in layer.sizes  # outputs and inputs, and no experts


def _compared(pair: SideBySide, drawn: ErrorMap | None) -> Comparison:
    """All runs; where nothing is drawn, those of a layer that agrees are looked at less closely."""
    finite, found = is_finite(pair.subject, pair.layer), Comparison()
    if drawn is None and all(agree(weight, other, finite=finite) for _, weight, other in pair.runs()):
        return found
    for start, weight, other in pair.runs():
        found.add(start, weight, other)
        if drawn is not None:
            drawn.add(start, meant(weight), meant(other))
    return found


def _verdict(name: str, found: Comparison, cause: str | None, lawful: bool) -> Iterator[Finding | str]:
    assert found.first is not None
    place, got, want = found.first
    letters = ", ".join("enk"[-len(place) :])
    where = (
        f"{name}: differs from the reference first at ({letters}) = {place}: {got:g}, "
        f"the reference has {want:g}; "
        f"{found.differing} of {found.total} differ"
    )
    spiky = lawful and found.spike_ratio > SPIKE
    if lawful and cause is None and not spiky:
        yield f"{name}: relative error {found.distance.relative:.3f} to a plain reference"
        return
    if cause is None and spiky:
        n, k = found.spike[1]
        cause = (
            f"a word at (n, k) = ({n}, {k}) is off by {found.spike[0] ** 0.5:.1f} steps, the layer by "
            f"{(found.steps / found.total) ** 0.5:.2f}: a few words are not what was quantized"
        )
    yield Finding(VALUE, "error", name, None, f"{where}\n{cause}" if cause else where)
