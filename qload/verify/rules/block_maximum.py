"""Of every block of a bitsandbytes layer the largest weight has the code 1 or -1, and no scale is negative.

The scale of a block is its largest magnitude, so that what has it is at an end of the table. Scales that are
quantized mean a sum, of which a wrong offset makes negative ones.
"""

from collections.abc import Iterator

from qload.formats import BNB4Config
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

SLACK = 0.1  # of the offset: what a block of zeros comes to, once its scale is rounded to a code


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each layer with a block that reaches no end, or with a scale below zero."""
    for layer in subject.described():
        found, config = subject.values.statistics.get(layer.prefix), layer.format.config
        if found is None or not isinstance(config, BNB4Config):
            continue
        name, file = layer.names.full("absmax"), layer.names.file("absmax")
        if config.nested_blocksize and found.low < -SLACK * abs(config.offset):
            message = f"{name}: a quantized scale means {found.low:g}, and no largest magnitude does"
            yield rule.finding(name, file, message, "the nested_offset of the quantization state is wrong")
        elif found.reach is not None and found.reach < 1 and layer.K % config.blocksize == 0:
            name = layer.names.full("weight")
            yield rule.finding(
                name, layer.names.file("weight"),
                f"{name}: {1 - found.reach:.2%} of {found.groups} blocks have no weight of 1 or -1",
            )  # fmt: skip


RULE = Rule("block-maximum", "values", check, each=True)
