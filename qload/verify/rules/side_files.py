"""The quantizer's own config file agrees with config.json, which counts."""

from collections.abc import Iterator

from qload.detect import read_claims
from qload.errors import QloadError
from qload.verify.report import Finding, finding_of
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

FIELDS = ("method", "format", "bits", "group_size", "sym", "desc_act")


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each setting that a second config file says otherwise."""
    if len(subject.configs) < 2:
        return
    first = read_claims(subject.configs[0])
    for found in subject.configs[1:]:
        try:
            other = read_claims(found)
        except QloadError as error:
            yield finding_of(error, severity=rule.severity)
            continue
        for name in FIELDS:
            a, b = getattr(first, name), getattr(other, name)
            if a is not None and b is not None and a != b:
                yield rule.finding(
                    None,
                    found.file,
                    f"{found.file}: {name} is {b!r}, {first.file} says {a!r} and is believed",
                    f"make {found.file} say what {first.file} says, or remove it",
                )


RULE = Rule("config-side-file", "headers", check, "warning")
