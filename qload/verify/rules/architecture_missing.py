"""What the type of model says has to be stored is stored: matrices, norms, biases, experts, the head.

Whole layers are another rule's (`layer-count`), and what one layer alone lacks is `missing-sibling`'s; this
one knows what every layer lacks, what several lack alike, and what there is once: embedding, last norm, head.
"""

from collections.abc import Iterator

from qload.architecture import Architecture, Missing
from qload.architecture.config import TIE, tie_of
from qload.architecture.table import spelled
from qload.verify.report import Finding
from qload.verify.rules import siblings
from qload.verify.rules.layer_count import listed
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each thing that is lacking, once, however many layers lack it; a draft may lack anything."""
    if subject.ordinary:
        yield from lacking(rule, subject)


def lacking(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """What the table of the type says, and what is not there."""
    inventory = subject.inventory
    if inventory is None:
        return
    told = [finding.tensor or "" for finding in siblings.check(siblings.RULE, subject)]
    for missing in inventory.missing():
        if not any(name == missing.name or name.startswith(f"{missing.name}.") for name in told):
            message = (
                f"{missing.name}: not stored{_where(missing)}; config.json says {_says(subject, missing)}"
            )
            yield rule.finding(missing.name, None, message, _remedy(subject, missing))


def _where(missing: Missing) -> str:
    if missing.what == "the model" or (missing.count == 1 and missing.what == "layers"):
        return ""
    numbers = listed(missing.numbers, missing.count)
    if missing.what == "layers":
        return f", in {missing.count} of {missing.total} layers: {numbers}"
    return f", nor of {missing.count} experts in all: {numbers}" if missing.count > 1 else ""


def _says(subject: Subject, missing: Missing) -> str:
    architecture = subject.architecture
    assert architecture is not None  # there is an inventory of it
    if _is_head(architecture, missing):
        return f"model_type is {architecture.type}, and not that head and embedding are tied"
    return f"model_type is {architecture.type}"


def _is_head(architecture: Architecture, missing: Missing) -> bool:
    return missing.name.endswith(spelled(architecture.table.head))


def _remedy(subject: Subject, missing: Missing) -> str:
    """Remedy; for a missing head, also a tie to the embedding."""
    again, tie = "fetch or write the checkpoint again", tie_of(subject.model_config)
    if subject.architecture is None or not _is_head(subject.architecture, missing):
        return again
    return f"{again}; or, if the embedding is the head, set {tie.key or TIE} to true in config.json: {tie}"


RULE = Rule("architecture-missing", "headers", check)
