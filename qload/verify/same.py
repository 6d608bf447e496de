"""Whether a layer is its reference, byte for byte: then it means the same, and nothing is dequantized."""

from qload.loader import LayerDescription
from qload.spec import TensorSpec
from qload.storage import WeightStorage
from qload.verify.causes import SideBySide
from qload.verify.comparison import equal_bits
from qload.verify.subject import Subject
from qload.verify.values import Values
from qload.verify.values.pieces import pieces

LARGEST = 2.0**30  # of scales: no product of as many as a format has is infinite, so that none is NaN


def same(pair: SideBySide) -> bool:
    """Whether both are stored alike, in equal bytes, that mean a number everywhere; NaN equals nothing."""
    ours, theirs = pair.layer, pair.other
    alike = ours.format == theirs.format and ours.sizes == theirs.sizes and ours.dtypes == theirs.dtypes
    if not alike or not is_finite(pair.subject, ours):
        return False
    assert pair.subject.weights is not None
    assert pair.reference.weights is not None
    here, there = pair.subject.weights.storage, pair.reference.weights.storage
    return all(
        _equal(here, ours.names.full(spec.name), there, theirs.names.full(spec.name)) for spec in ours.specs
    )


def _equal(here: WeightStorage, name: str, there: WeightStorage, other: str) -> bool:
    if here.info(name).shape != there.info(other).shape:
        return False
    both = zip(pieces(here, name), pieces(there, other), strict=True)
    return all(equal_bits(one, two) for one, two in both)


def is_finite(subject: Subject, layer: LayerDescription) -> bool:
    """Whether it was measured, could be read, and holds nothing of which NaN or an infinity can come."""
    values: Values | None = vars(subject).get("values")
    if values is None or not (layer.format.weight_type.plain or layer.prefix in values.statistics):
        return False
    return all(_believed(values, layer, spec) for spec in layer.specs)


def _believed(values: Values, layer: LayerDescription, spec: TensorSpec) -> bool:
    numbers = values.numbers.get(layer.names.full(spec.name))
    if numbers is None:
        return not layer.dtypes[spec.name].is_floating_point
    least = spec.divides and (numbers.zeros > 0 or numbers.least < 1 / LARGEST)
    return numbers.finite and numbers.largest < LARGEST and not least
