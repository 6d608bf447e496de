"""The weights of a layer are about as large as those of other layers.

Scales that were inverted, or multiplied by a thousand, are finite and valid. What they mean is a weight whose
standard deviation is far from that of the same projection in other layers, or from that of any trained layer.
"""

from collections.abc import Iterator
from math import isfinite
from statistics import median

from qload.spec import Role
from qload.verify.kin import block, kinds
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

LARGEST, SMALLEST = 2.0, 1e-5  # standard deviation of a quantized layer; sound ones have 0.01 to 0.32
MODEL = 4  # layers, of which fewer may be a sample with any scale
TIMES = 100.0  # the same projection of other layers; of sound ones up to 2


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each layer of a model whose weights are too large, or too small beside its like."""
    layers = {layer.prefix: layer for layer in subject.described() if block(layer.prefix) is not None}
    found = subject.values.statistics
    for alike in kinds(prefix for prefix in layers if prefix in found).values():
        sizes = [size for prefix in alike if isfinite(size := found[prefix].deviation)]
        middle = median(sizes) if sizes else 0.0
        for prefix in alike:
            size = found[prefix].deviation
            if not isfinite(size):
                continue  # another rule tells
            much = len(layers) >= MODEL and size and not SMALLEST <= size <= LARGEST
            beside = size and not middle / TIMES <= size <= middle * TIMES
            if not much and not (beside and middle):
                continue
            layer = layers[prefix]
            field = next((spec.name for spec in layer.specs if spec.role is Role.SCALE), layer.specs[0].name)
            name, file = layer.names.full(field), layer.names.file(field)
            against = (
                f"that of its like in other layers is {middle:g}"
                if beside
                else f"sound ones have {SMALLEST:g} to {LARGEST:g}"
            )
            yield rule.finding(
                name, file, f"{name}: the weights have a standard deviation of {size:g}, and {against}"
            )


RULE = Rule("weight-size", "values", check)
