"""Codes, scales and matrices are not one value all through, where others of their kind are not.

A buffer that was allocated and never filled holds zeros, or ones, or what it was initialised with. It has the
right dtype and shape, and no value that is not valid. Layers that were added and do nothing yet are sound.
"""

from collections.abc import Iterator, Mapping

from qload.spec import Role
from qload.verify.kin import kind, kinds
from qload.verify.report import Finding
from qload.verify.rules.expanded import expanded
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

AROUND_ONE = "gemma"  # types of model that add one to what their norms store
LEAST = 64  # bytes that are not alike by accident


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each such tensor, and what else of its kind varies."""
    assert subject.weights is not None
    contents, zeros = subject.values.contents, expanded(subject)
    for group in (_codes(subject), _scales(subject), _matrices(subject), _norms(subject)):
        varying = [name for name in group if contents[name].word is None]
        alike = kinds(group)
        varied = {
            own: next((kin for kin in names if contents[kin].word is None), None)
            for own, names in alike.items()
        }
        for name in group:
            word = contents[name].word
            if word is None or contents[name].nbytes < LEAST or subject.prefixes[name] in zeros:
                continue
            own = kind(name)
            other = varied[own]
            if other is None and len(alike[own]) == 1 and not group[name]:
                other = next(iter(varying), None)
            if other is not None:
                why = f"those of {other} differ"
            elif _multiplies(subject, name, word):
                why = "the model multiplies by its norms"
            else:
                continue
            yield rule.finding(
                name,
                subject.weights.info(name).file,
                f"{name}: all {contents[name].nbytes} bytes repeat {_shown(word)}, and {why}: it was never "
                "filled",
                "fetch or write the checkpoint again",
            )


# name -> whether only others of its own kind tell what it should be


def _codes(subject: Subject) -> Mapping[str, bool]:
    return {
        layer.names.full(spec.name): False
        for layer in subject.described()
        for spec in layer.specs[:1]
        if not layer.format.weight_type.plain
    }


def _scales(subject: Subject) -> Mapping[str, bool]:
    return {
        layer.names.full(spec.name): True
        for layer in subject.described()
        for spec in layer.specs
        if spec.role is Role.SCALE and not spec.is_exponents
    }


def _matrices(subject: Subject) -> Mapping[str, bool]:
    assert subject.weights is not None
    found = {}
    for name in subject.judged:
        shape = subject.weights.info(name).shape
        matrix = name in subject.values.numbers and subject.role(name) is Role.FLOAT and len(shape) > 1
        if matrix and min(shape) > 1 and "lora" not in name:
            found[name] = not name.endswith(".weight") or len(shape) > 2
    return found


def _norms(subject: Subject) -> Mapping[str, bool]:
    """Norms that are all zero; any other constant is how they begin."""
    found = {}
    for name in subject.judged:
        numbers = subject.values.numbers.get(name)
        if numbers and name.endswith("norm.weight") and subject.values.contents[name].word in (None, 0):
            found[name] = False
    return found


def _multiplies(subject: Subject, name: str, word: int) -> bool:
    """Whether a tensor of zeros is a norm of a type of model in which nothing is left after it."""
    architecture = subject.architecture
    if word or not name.endswith("norm.weight") or architecture is None:
        return False
    return not architecture.type.startswith(AROUND_ONE) and architecture.find(name) is not None


def _shown(word: int) -> str:
    return "zeros" if not word else f"0x{word % 2**64:016x}"


RULE = Rule("constant-values", "values", check)
