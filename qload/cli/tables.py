"""What every verb's output shares: the verdict in a line, the findings, the notes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from qload.cli.console import Paragraph, glued
from qload.cli.summary import verdict_line
from qload.cli.text import name, safe

if TYPE_CHECKING:
    from qload.verify import Finding, Report

STYLE = {"ok": "bold green", "error": "red", "warning": "yellow"}
ROOMY = 110  # columns from which findings are a table
MESSAGE_WIDTH = 44  # columns that a message has at least beside names


def verdict(report: "Report") -> Text:
    """ok  ./model: 21 layers, 7 plain tensors, 100 % of 1.1 MiB explained."""
    rest = verdict_line(report).removeprefix(report.verdict)
    return Text(report.verdict, STYLE.get(report.verdict, "bold red")).append(rest, "none")


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


@dataclass(frozen=True)
class NamedRow:
    """Facts of something that has a name; `count`: how many share the row; `style` of the whole row."""

    name: str
    facts: Sequence[Text]
    count: int = 1
    style: str = ""


@dataclass(frozen=True)
class NameTable:
    """A row for each name where the longest row fits; else each name whole in a line, its facts under it.

    `title` is that of the names and `columns` those of the facts; `right`: columns of numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[NamedRow]
    right: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        wide = self._wide()
        if Measurement.get(console, options.update(width=10_000), wide).maximum <= options.max_width:
            yield wide
        else:
            yield from self._narrow(options.max_width)

    def _wide(self) -> Table:
        shown = table()
        shown.add_column(self.title)
        counted = any(row.count > 1 for row in self.rows)
        if counted:
            shown.add_column("count", justify="right")
        for column in self.columns:
            shown.add_column(column, justify="right" if column in self.right else "left")
        for row in self.rows:
            count = [str(row.count) if row.count > 1 else ""] if counted else []
            shown.add_row(Text(row.name), *count, *row.facts, style=row.style, end_section=bool(row.style))
        return shown

    def _narrow(self, width: int) -> Iterator[RenderableType]:
        """Facts in columns where these fit, else each behind its title."""
        cells = [[Text(column, "bold") for column in self.columns], *(row.facts for row in self.rows)]
        widths = [max(cell_len(cell.plain) for cell in column) for column in zip(*cells, strict=True)]
        aligned = sum(widths) + 2 * len(widths) <= width
        yield ""
        if aligned:
            yield Paragraph(_aligned(cells[0], widths))
        for row in self.rows:
            count = f"  x{row.count}" if row.count > 1 else ""
            yield Paragraph(Text(f"{glued(row.name)}{count}", row.style))
            if aligned:
                yield Paragraph(_aligned(row.facts, widths))
            else:
                yield Paragraph(_titled(self.columns, row.facts), 2)
        yield ""


def _aligned(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    line = Text("  ")
    for cell, width in zip(cells, widths, strict=True):
        line.append_text(cell).append(" " * (width - cell_len(cell.plain) + 2))
    line.rstrip()
    return line


def _titled(titles: Sequence[str], cells: Sequence[Text]) -> Text:
    """`format gptq, bits 4`; without cells that are empty."""
    facts = []
    for title, cell in zip(titles, cells, strict=True):
        if cell:
            fact = Text(f"{title} ", "dim").append_text(cell)
            fact.plain = glued(fact.plain)
            facts.append(fact)
    return Text(", ").join(facts)


@dataclass(frozen=True)
class FindingTable:
    """A row a finding where there is room for a table, a paragraph a finding where there is none."""

    findings: "Sequence[Finding]"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        wide = self._wide()
        roomy = options.max_width >= ROOMY
        if (
            roomy
            and Measurement.get(console, options.update(width=10_000), wide).minimum <= options.max_width
        ):
            yield wide
            return
        yield ""
        for finding in self.findings:
            yield Paragraph(_title(finding))
            yield Paragraph(_what(finding), 4)
            yield ""

    def _wide(self) -> Table:
        """Columns as wide as their names, and messages at least as wide as their longest word."""
        shown = table()
        rows = [
            (_severity(each), Text(safe(each.rule)), Text("\n".join(_where(each)) or "-"), _what(each))
            for each in self.findings
        ]
        for title, column in zip(("severity", "rule", "tensor, file"), zip(*rows, strict=True), strict=False):
            lines = [title, *(line for text in column for line in text.plain.split("\n"))]
            shown.add_column(title, width=max(map(cell_len, lines)))
        shown.add_column("message, remedy", min_width=MESSAGE_WIDTH)
        for row in rows:
            shown.add_row(*row)
        return shown


def _title(finding: "Finding") -> Text:
    return Text("  ").join(
        [_severity(finding), *map(Text, map(glued, (safe(finding.rule), *_where(finding))))]
    )


def _severity(finding: "Finding") -> Text:
    return Text(safe(finding.severity), STYLE.get(finding.severity, ""))


def _where(finding: "Finding") -> list[str]:
    return [name(part) for part in (finding.tensor, finding.file) if part]


def _what(finding: "Finding") -> Text:
    what = Text(safe(finding.detail, keep="\n"))
    if finding.remedy:
        what.append("\nremedy  ", "green").append(_indented(finding.remedy, 8), "none")
    return what


def _indented(text: str, by: int) -> str:
    return safe(text, keep="\n").replace("\n", "\n" + " " * by)
