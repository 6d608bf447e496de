"""A tensor beside a quantized layer's own that its format does not explain.

What no loader reads is dropped without a word by most engines; `weight_scale` beside `qweight` means
that some program saw another format here.
"""

from collections.abc import Iterator

from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each stranger among the tensors of a quantized layer."""
    assert subject.weights is not None
    for layer in subject.described():
        if layer.format.weight_type.format == "unquantized":
            continue
        known = {suffix for spec in layer.format.specs() for suffix in spec.suffixes} | {"bias"}
        for suffix in subject.suffixes[layer.prefix]:
            if suffix not in known:
                name = f"{layer.prefix}.{suffix}"
                yield rule.finding(
                    name,
                    subject.weights.info(name).file,
                    f"{name}: no part of a {layer.format.weight_type.format} layer, "
                    "so that nothing will read it",
                )


RULE = Rule("unexplained-tensor", "headers", check, "warning", each=True)
