"""The weights of a layer are about as large as those of other layers.

Scales that were inverted, or multiplied by a thousand, are finite and valid. What they mean is a weight whose
standard deviation is far from that of the same projection in other layers; or, where that happened to all of
them, weights that are far from those of any trained model.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from statistics import median, median_high, median_low

from qload.spec import Role
from qload.verify.kin import block, kinds
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

LARGEST, SMALLEST = 2.0, 1e-5  # median of a model's standard deviations; of sound models 0.06 to 0.33
MODEL = 4  # layers, of which fewer may be a sample with any scale
ABOVE, LARGE = 10.0, 0.5  # times the same projection of other layers; of sound ones up to 2; and at least
FAR = 100.0  # times, where what is at least LARGE is no larger than LARGEST
BELOW, SMALL = 500.0, 1e-3  # the same of weights that are smaller
HUGE = 1000.0  # of one layer, whatever its like have; inverted scales make 10,000 and more
EXPERT = ".experts."  # one that no token was sent to is lawfully as small as decay has made it


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each layer whose weights are too large, or too small, beside its like; each one of a model of such."""
    layers = {layer.prefix: layer for layer in subject.described() if block(layer.prefix) is not None}
    found = subject.values.statistics
    sizes = {
        prefix: found[prefix].deviation
        for prefix in layers
        if prefix in found and found[prefix].deviation and isfinite(found[prefix].deviation)
    }  # of the others another rule tells
    whole = median(sizes.values()) if len(sizes) >= MODEL else SMALLEST
    for alike in kinds(sizes).values():
        for prefix in alike:
            size = sizes[prefix]
            alone = size > HUGE and len(sizes) >= MODEL
            if alone or (not SMALLEST <= whole <= LARGEST and not SMALLEST <= size <= LARGEST):
                against = f"sound ones have {SMALLEST:g} to {LARGEST:g}"
            elif (like := _beside(prefix, alike, sizes)) is not None:
                against = f"that of its like in other layers is {like:g}"
            else:
                continue
            layer = layers[prefix]
            field = next((spec.name for spec in layer.specs if spec.role is Role.SCALE), layer.specs[0].name)
            name, file = layer.names.full(field), layer.names.file(field)
            yield rule.finding(
                name, file, f"{name}: the weights have a standard deviation of {size:g}, and {against}"
            )


def _beside(prefix: str, names: Sequence[str], sizes: Mapping[str, float]) -> float | None:
    """The size of most of a layer's like, where its own is too far from it; None where it is not."""
    size, alike = sizes[prefix], [sizes[name] for name in names]
    low, high = median_low(alike), median_high(alike)
    if (size > LARGEST and size > ABOVE * low) or (size > LARGE and size > FAR * low):
        return low
    small = size < SMALL and BELOW * size < high
    return high if small and not _is_of_no_use(prefix, sizes) else None


def _is_of_no_use(prefix: str, sizes: Mapping[str, float]) -> bool:
    """Whether a layer is of an expert all of whose layers are as small."""
    lead = f"{prefix.rpartition('.')[0]}."
    return EXPERT in lead and all(size < SMALL for name, size in sizes.items() if name.startswith(lead))


RULE = Rule("weight-size", "values", check)
