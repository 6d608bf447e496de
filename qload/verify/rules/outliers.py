"""No scale, and no plain value, is far beyond all others; and scales of zero have no codes to scale.

One flipped bit of an exponent makes a value 256 times as large as it was, or 1e30, which is valid. A scale
of zero is how a quantizer writes a group of zeros, whose codes are all alike.
"""

from collections.abc import Iterator

from qload.spec import Role, TensorSpec
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.verify.values import Numbers

COUNT = 8  # scales that have a median to speak of
SCALE = 200.0  # times the median; sound scales reach 15, and one weight of 100 deviations makes 40
ALONE = 50.0  # times the quantile 0.95: where many are large, none is an outlier
VALUE = 1e6  # of a plain tensor, and so many times the median
LOST, ALL = 0.1, 0.9  # the share of groups; of sound layers none, and of all another rule speaks


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor with such a value, and each layer with such groups."""
    assert subject.weights is not None
    for name in subject.judged:
        numbers, spec = subject.values.numbers.get(name), subject.specs.get(name)
        if numbers is not None and numbers.finite and numbers.median:
            most = _most(numbers, subject.role(name), spec)
            if most is not None and numbers.largest > most:
                times = numbers.largest / numbers.median
                yield rule.finding(
                    name,
                    subject.weights.info(name).file,
                    f"{name}: a value of {numbers.largest:g}, {times:.3g} times the median",
                )
    for layer in subject.described():
        found = subject.values.statistics.get(layer.prefix)
        if found is not None and LOST < found.lost < ALL:
            field = next(spec.name for spec in layer.specs if spec.role is Role.SCALE)
            name, file = layer.names.full(field), layer.names.file(field)
            message = f"{name}: {found.lost:.1%} of the scales are zero, and the codes of their groups differ"
            yield rule.finding(name, file, message)


def _most(numbers: Numbers, role: Role, spec: TensorSpec | None) -> float | None:
    """The largest magnitude that is sound; None where nothing is known."""
    if role is Role.SCALE:
        if numbers.count < COUNT or spec is None or spec.divides:
            return None
        return max(SCALE * numbers.median, ALONE * numbers.quantiles[2])
    return max(VALUE, VALUE * numbers.median) if role is Role.FLOAT else None


RULE = Rule("value-outlier", "values", check, each=True)
