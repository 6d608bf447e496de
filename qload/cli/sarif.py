"""Findings in SARIF 2.1.0, the format of code scanning.

Each rule comes with the text of its page. Findings of one cause are one result, with a location per place:
the file, relative to the current directory, and the tensor as a logical location. Source: the SARIF 2.1.0
standard of OASIS, errata 01.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from qload.cli.options import STDOUT
from qload.cli.output import dumps, write_file

if TYPE_CHECKING:
    from qload.errors.reporting import CauseGroup
    from qload.verify import Finding, Report

SARIF_SCHEMA_URL = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
MAX_LOCATIONS_PER_RESULT = 1000  # the limit of GitHub's code scanning


def write_sarif(reports: "Sequence[Report]", path: Path) -> None:
    """Write the findings of all reports to a file, or to standard output."""
    text = dumps(sarif_log(reports))
    if path == STDOUT:
        click.echo(text)
    else:
        write_file(path, f"{text}\n")


def sarif_log(reports: "Sequence[Report]") -> dict[str, Any]:
    """Return a SARIF log of one run over all checkpoints."""
    from qload.errors.reporting import group_texts, qload_version
    from qload.errors.rules import rule_pages
    from qload.verify.report import group_findings

    version = {"version": qload_version()} if qload_version() else {}
    groups = [(report, group) for report in reports for group in group_findings(report.findings)]
    rules = list(dict.fromkeys([*rule_pages(), *(group.first.rule for _, group in groups)]))
    notes = [note for report in reports for note in group_texts(report.notes)]
    notifications = [{"level": "note", "message": {"text": note}} for note in notes]
    driver = {"name": "qload", **version, "rules": [_rule_descriptor(rule) for rule in rules]}
    invocation = {"executionSuccessful": True, "toolExecutionNotifications": notifications}
    return {
        "$schema": SARIF_SCHEMA_URL,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "invocations": [invocation],
                "results": list(_results(groups, {rule: index for index, rule in enumerate(rules)})),
            }
        ],
    }


def _results(
    groups: "Sequence[tuple[Report, CauseGroup[Finding]]]", rule_indices: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    from qload.verify.report import shown_message

    counts: Counter[str] = Counter()
    for report, group in groups:
        finding = group.first
        artifact = _artifact_location(_finding_path(report, finding))
        mark = hashlib.sha256(dumps([finding.rule, artifact, finding.tensor]).encode()).hexdigest()[:16]
        counts[mark] += 1  # tells alerts with the same rule, file and tensor apart
        message = finding.message if group.count <= 1 else f"{group.count} places: {shown_message(group)}"
        yield {
            "ruleId": finding.rule,
            "ruleIndex": rule_indices[finding.rule],
            "level": finding.severity,
            "message": {"text": f"{message}\nRemedy: {finding.remedy}" if finding.remedy else message},
            "locations": _locations(report, group),
            "properties": {"cause": finding.cause, "places": group.count},
            "partialFingerprints": {"primaryLocationLineHash": f"{mark}:{counts[mark]}"},
        }


def _locations(report: "Report", group: "CauseGroup[Finding]") -> list[dict[str, Any]]:
    """Return a location per place, up to the limit of code scanning."""
    places = {(finding.tensor, _finding_path(report, finding)): None for finding in group.items}
    return [_location(tensor, file) for tensor, file in islice(places, MAX_LOCATIONS_PER_RESULT)]


def _location(tensor: str | None, file: str) -> dict[str, Any]:
    # A file of tensors has no lines, but code scanning requires one.
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": _artifact_location(file), "region": {"startLine": 1}}
    }
    if tensor is not None:
        location["logicalLocations"] = [{"fullyQualifiedName": tensor, "kind": "tensor"}]
    return location


def _finding_path(report: "Report", finding: "Finding") -> str:
    """Return the path of the finding's file if it exists, else that of the checkpoint."""
    folder = report.path if os.path.isdir(report.path) else os.path.dirname(report.path)
    file = os.path.join(folder, finding.file or "")
    return file if finding.file and os.path.lexists(file) else report.path


def _artifact_location(path: str) -> dict[str, str]:
    """Return a location relative to the current directory, or an absolute one outside of it."""
    full, current = os.path.abspath(path), os.getcwd()
    is_on_drive = os.path.splitdrive(full)[0] == os.path.splitdrive(current)[0]
    relative = os.path.relpath(full, current) if is_on_drive else os.pardir
    if relative.split(os.sep)[0] == os.pardir:
        return {"uri": f"file://{_quote_path(full)}"}
    return {"uri": _quote_path(relative), "uriBaseId": "%SRCROOT%"}


def _quote_path(path: str) -> str:
    slash = b"/" if os.path.splitdrive(path)[0] else b""
    return quote(slash + os.fsencode(path.replace(os.sep, "/")))


def _rule_descriptor(rule: str) -> dict[str, Any]:
    from qload.errors.rules import rule_pages

    page = rule_pages().get(rule)
    if page is None:
        return {"id": rule}
    what, why, do = page["what"], page["why"], page["do"]
    return {
        "id": rule,
        "shortDescription": {"text": what.partition(". ")[0].removesuffix(".") + "."},
        "fullDescription": {"text": what},
        "help": {
            "text": f"{what}\n\nWhy it matters: {why}\n\nRemedy: {do}",
            "markdown": f"{what}\n\n**Why it matters.** {why}\n\n**Remedy.** {do}",
        },
    }
