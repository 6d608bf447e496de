"""What the config says of a detail is what the tensors are.

Loaders believe the tensors. A program that believes the config reads bytes of e5m2 as e4m3, or takes scales
that are floats for codes.
"""

from collections.abc import Iterator

from qload.formats import BNB4Config, Fp8Config
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

CLAIMING = (BNB4Config, Fp8Config)


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each claim that is wrong, once: of all layers, or the first layer, and how many."""
    found: dict[str, list[str]] = {}
    for layer in subject.described():
        if isinstance(layer.format.config, CLAIMING):
            for note in layer.notes:
                found.setdefault(note, []).append(layer.prefix)
    claiming = [layer for layer in subject.described() if isinstance(layer.format.config, CLAIMING)]
    file = subject.claims.file if subject.claims else None
    for note, prefixes in found.items():
        remedy = f"correct this setting in {file or 'the config'}"
        if len(prefixes) == len(claiming) > 1 and not subject.shard:
            message = f"{file}: {note}, in all {len(prefixes)} layers"
            yield rule.finding(None, file, message, remedy)
        else:
            message = f"{prefixes[0]}: {note}; {len(prefixes)} layers in all"
            yield rule.finding(prefixes[0], file, message, remedy)


RULE = Rule("claimed-detail", "headers", check, "warning")
