"""A quantized layer has outputs and inputs.

One of none agrees with every declaration, and multiplies to nothing.
"""

from collections.abc import Iterator

from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each quantized layer of no outputs, or of no inputs."""
    for layer in subject.described():
        if not layer.format.weight_type.plain and 0 in (layer.N, layer.K):
            codes = layer.specs[0].name
            name = layer.names.full(codes)
            yield rule.finding(
                name, layer.names.file(codes), f"{name}: a layer of (N, K) = ({layer.N}, {layer.K})"
            )


RULE = Rule("empty-layer", "headers", check, each=True)
