"""A config beside the one that counts can be read, as the programs that prefer it will.

What it says otherwise than the one that counts is decided where checkpoints are opened.
"""

from collections.abc import Iterator

from qload.detect import read_claims
from qload.errors import QloadError, UnsupportedFormatError
from qload.verify.report import Finding, finding_of
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each second config that is malformed, or of a method that is not read."""
    for found in subject.configs[1:]:
        try:
            read_claims(found)
        except QloadError as error:
            finding = finding_of(error, severity=rule.severity)
            if isinstance(error, UnsupportedFormatError):  # about this config, not the checkpoint
                finding = rule.finding(None, found.file, f"{found.file}: {finding.message}", finding.remedy)
            yield finding


RULE = Rule("config-side-file", "headers", check, "warning")
