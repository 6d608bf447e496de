"""The bias of a quantized layer is a float for each of its outputs.

No format says anything of a bias, so that nothing else compares it with the layer it stands beside.
"""

from collections.abc import Iterator

from qload.formats.unquantized import FLOATS
from qload.spec import named
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each bias of another length, or of whole numbers."""
    assert subject.weights is not None
    for layer in subject.described():
        name = named(layer.prefix, "_bias" if layer.specs[0].suffix.startswith("_") else "bias")
        if layer.format.weight_type.plain or not subject.weights.has_tensor(name):
            continue
        info, dims = subject.weights.info(name), [dim for dim in "EN" if dim in layer.sizes]
        expected = tuple(layer.sizes[dim] for dim in dims)
        if info.shape != expected:
            formula = f"({', '.join(dims)}{',' * (len(dims) == 1)})"
            yield rule.finding(
                name,
                info.file,
                f"{name}: wrong shape\nexpected {expected} = {formula}\ngot      {info.shape}",
            )
        if info.dtype not in FLOATS:
            allowed, got = (str(dtypes).replace("torch.", "") for dtypes in (FLOATS, info.dtype))
            yield rule.finding(
                name, info.file, f"{name}: wrong dtype\nexpected one of {allowed}\ngot      {got}"
            )


RULE = Rule("bias-shape", "headers", check, each=True)
