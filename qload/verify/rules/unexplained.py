"""A tensor that neither a format nor a name explains: beside a quantized layer's own, or in no layer at all.

What no loader reads is dropped without a word by most engines; `weight_scale` beside `qweight` means
that some program saw another format here.
"""

from collections.abc import Iterator

from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor that is left over when every layer and every plain tensor is accounted for."""
    assert subject.weights is not None
    for name, layer in subject.account.unexplained.items():
        info = subject.weights.storage.info(name)
        dtype = str(info.dtype).removeprefix("torch.")
        stranger = (
            f"{dtype} {info.shape} is of no layer"
            if layer is None
            else f"no part of a {layer.format.weight_type.format} layer"
        )
        yield rule.finding(name, info.file, f"{name}: {stranger}, so that nothing will read it")


RULE = Rule("unexplained-tensor", "headers", check, "warning")
