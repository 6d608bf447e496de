"""What every verb's output shares: the verdict in a line, the findings, the notes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from qload.cli.text import name, percent, plural, safe, size

if TYPE_CHECKING:
    from qload.listing import Coverage
    from qload.verify import Finding, Report

STYLE = {"ok": "bold green", "error": "red", "warning": "yellow"}
ROOMY = 110  # columns from which findings are a table


def verdict(report: "Report") -> Text:
    """ok  ./model: 21 layers, 7 plain tensors, 100 % of 1.1 MiB explained."""
    counts = Counter(finding.severity for finding in report.findings)
    found = [plural(counts[severity], severity) for severity in ("error", "warning") if counts[severity]]
    found += [plural(len(report.notes), "note")] if report.notes else []
    line = Text(report.verdict, STYLE.get(report.verdict, "bold red"))
    said = [", ".join(found)] if found else []
    said += [_coverage(report.coverage)] if report.coverage else []
    return line.append(f"  {safe(report.path)}: {'; '.join(said) or 'nothing found'}", "none")


def _coverage(coverage: "Coverage") -> str:
    """What was explained, and which share of the bytes; never 100 % of what was not."""
    counts = ((coverage.layers, "layer"), (coverage.plain_tensors, "plain tensor"))
    parts = [plural(count, what) for count, what in counts if count]
    parts.append(f"{percent(coverage.explained, coverage.total)} of {size(coverage.total)} explained")
    if coverage.unread:
        parts.append(f"{percent(coverage.unread, coverage.total)} not read")
    return ", ".join(parts)


def heading(report: "Report") -> Text:
    """The path, above what is one of several reports."""
    return Text(f"\n{safe(report.path)}", "bold")


def findings(report: "Report") -> Iterator[RenderableType]:
    """The findings, if there are any, and the notes under them."""
    if report.findings:
        yield FindingTable(report.findings)
    for note in report.notes:
        yield Text("note  ", "dim").append(_indented(note, 6), "none")


def table() -> Table:
    """An empty one, in the style of all."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


@dataclass
class FindingTable:
    """A row a finding where there is room for a table, a paragraph a finding where there is none."""

    findings: "Sequence[Finding]"

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if options.max_width >= ROOMY:
            yield self._wide()
        else:
            yield ""
            for finding in self.findings:
                yield _title(finding)
                yield Padding(_what(finding), (0, 0, 1, 4))

    def _wide(self) -> Table:
        shown = table()
        shown.add_column("severity", no_wrap=True)
        shown.add_column("rule", overflow="fold")
        shown.add_column("tensor, file", overflow="fold", ratio=4)
        shown.add_column("message, remedy", overflow="fold", ratio=5)
        for finding in self.findings:
            where = Text("\n".join(_where(finding)) or "-")
            shown.add_row(_severity(finding), safe(finding.rule), where, _what(finding))
        return shown


def _title(finding: "Finding") -> Text:
    return Text("  ").join([_severity(finding), *map(Text, (safe(finding.rule), *_where(finding)))])


def _severity(finding: "Finding") -> Text:
    return Text(safe(finding.severity), STYLE.get(finding.severity, ""))


def _where(finding: "Finding") -> list[str]:
    return [name(part) for part in (finding.tensor, finding.file) if part]


def _what(finding: "Finding") -> Text:
    message = finding.message
    for shown in (finding.file, finding.tensor):  # beside it already
        message = message.removeprefix(f"{shown}: ")
    what = Text(safe(message, keep="\n"))
    if finding.remedy:
        what.append("\nremedy  ", "green").append(_indented(finding.remedy, 8), "none")
    return what


def _indented(text: str, by: int) -> str:
    return safe(text, keep="\n").replace("\n", "\n" + " " * by)
