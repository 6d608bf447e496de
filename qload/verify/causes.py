"""Which mistake sets a layer apart from its reference: found in a run of outputs, tried on all of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from qload.diagnosis.dequantized import meant, with_factors
from qload.diagnosis.diagnosis import explained
from qload.loader import LayerDescription, Part
from qload.spec import Weight
from qload.verify.chunks import outputs
from qload.verify.comparison import Distance, differ
from qload.verify.misreadings import Reading, readings, wrapped
from qload.verify.subject import Subject
from qload.verify.window import WindowSource

MATRIX = 2  # axes
CLOSEST = 3  # readings of one run that are tried on the whole layer


@dataclass(frozen=True)
class SideBySide:
    """A layer of a checkpoint, and the one that stands for it in the reference."""

    subject: Subject
    layer: LayerDescription
    reference: Subject
    other: LayerDescription

    def runs(self) -> Iterator[tuple[int, Weight, Weight]]:
        """Runs of outputs: the first of them, ours, and the reference's."""
        assert self.subject.weights is not None
        for start, weight in outputs(self.subject.weights, self.subject.loader, self.layer):
            run = (start, start + weight.layer.N)
            yield start, weight, self._load_reference(run)

    def load(self, run: tuple[int, int]) -> tuple[Weight, Weight]:
        """The outputs `run`: ours, and the reference's."""
        ours = self.subject.loader.load(self._ours, [Part(self.layer.prefix, *run)], None)
        return ours, self._load_reference(run)

    def _load_reference(self, run: tuple[int, int]) -> Weight:
        return self.reference.loader.load(self._theirs, [Part(self.other.prefix, *run)], None)

    @cached_property
    def _ours(self) -> WindowSource:
        assert self.subject.weights is not None
        return WindowSource(self.subject.weights)

    @cached_property
    def _theirs(self) -> WindowSource:
        assert self.reference.weights is not None
        return WindowSource(self.reference.weights)


def misreading(pair: SideBySide, run: tuple[int, int], near: float) -> str | None:
    """The mistake without which the layer agrees with the reference, in words.

    `run`: the outputs that are looked at first. `near`: the relative distance below which coming closer is
    enough; 0 for a quantized reference, which agrees or does not.
    """
    weight, reference = pair.load(run)
    every = _readings(weight, reference)
    tried = {name: Distance() for name in every}
    _add(tried, every, reference)
    closest = [name for name in _sorted(tried) if name and _better(tried[name], tried[""])][:CLOSEST]
    if not closest:
        return None
    whole = {name: Distance() for name in ("", *closest)}
    for _, weight, reference in pair.runs():
        _add(whole, _readings(weight, reference), reference)
    best = next(name for name in _sorted(whole) if name)
    if whole[best].exact:
        return f"read with {best}, it agrees"
    closer = whole[best].relative < min(near, whole[""].relative)
    return f"read with {best}, it comes closer" if closer else None


def other_wrapping(pair: SideBySide) -> str | None:
    """Name the other reading of zero points of 0 if it is closer to the reference; else None."""
    ours, other, name = Distance(), Distance(), ""
    for _, weight, reference in pair.runs():
        want, got = meant(reference), meant(weight)
        ours.add(got, want, differ(got, want, reference))
        for words, made in wrapped(weight, weight.codes()):
            got, name = with_factors(weight, made().dequantize().reshape(want.shape)), words
        other.add(got, want, differ(got, want, reference))
    closer = name and (other.exact or other.relative < ours.relative)
    return f"read with {name}, it {'agrees' if other.exact else 'comes closer'}" if closer else None


def known_fault(pair: SideBySide, run: tuple[int, int]) -> str | None:
    """The known fault that makes the outputs `run` of the reference ours, in words."""
    weight, reference = pair.load(run)
    want, got = meant(reference), meant(weight)
    return (
        explained(want, got, None if reference.plain else reference, run[0]) if want.ndim == MATRIX else None
    )


def _readings(weight: Weight, reference: Weight) -> dict[str, Reading]:
    """As it is, under no name, and in every other way."""
    return {"": lambda: (meant(weight), meant(reference)), **readings(weight, reference)}


def _add(into: Mapping[str, Distance], found: Mapping[str, Reading], reference: Weight) -> None:
    for name, distance in into.items():  # a run may be too short for a reading: then it counts as it is
        got, want = found.get(name, found[""])()
        distance.add(got, want, differ(got, want, reference))


def _sorted(tried: Mapping[str, Distance]) -> Iterable[str]:
    return sorted(tried, key=lambda name: (not tried[name].exact, tried[name].relative))


def _better(one: Distance, other: Distance) -> bool:
    return one.exact or one.relative < other.relative
