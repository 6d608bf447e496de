"""What every verb's tables share: the verdict in a line, the findings, the notes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from qload.cli.text import name, plural, safe

if TYPE_CHECKING:
    from qload.verify import Finding, Report

STYLE = {"ok": "bold green", "error": "red", "warning": "yellow"}


def verdict(report: "Report") -> Text:
    """ok  ./model: 12 layers, nothing found"""
    counts = Counter(finding.severity for finding in report.findings)
    found = [plural(counts[severity], severity) for severity in ("error", "warning") if counts[severity]]
    found += [plural(len(report.notes), "note")] if report.notes else []
    line = Text(report.verdict, STYLE.get(report.verdict, "bold red"))
    return line.append(f"  {safe(report.path)}: {', '.join(found) or 'nothing found'}", "none")


def findings(report: "Report") -> Iterator[RenderableType]:
    """A table of the findings, if there are any, and the notes under it."""
    if report.findings:
        yield _findings(report.findings)
    for note in report.notes:
        yield Text("note  ", "dim").append(_indented(str(note), 6), "none")


def table() -> Table:
    """An empty one, in the style of all."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _findings(found: "Sequence[Finding]") -> Table:
    rows = table()
    rows.add_column("severity", no_wrap=True)
    rows.add_column("rule", overflow="fold")
    rows.add_column("tensor, file", overflow="fold", ratio=2)
    rows.add_column("message, remedy", overflow="fold", ratio=3)
    for finding in found:
        where = [name(part) for part in (finding.tensor, finding.file) if part]
        rows.add_row(
            Text(safe(finding.severity), STYLE.get(finding.severity, "")),
            safe(finding.rule),
            Text("\n".join(where) or "-"),
            _what(finding),
        )
    return rows


def _what(finding: "Finding") -> Text:
    message = finding.message.removeprefix(f"{finding.tensor}: ")  # it stands in the column before
    what = Text(safe(message, keep="\n"))
    if finding.remedy:
        what.append("\nremedy  ", "green").append(_indented(finding.remedy, 8))
    return what


def _indented(text: str, by: int) -> str:
    return safe(text, keep="\n").replace("\n", "\n" + " " * by)
