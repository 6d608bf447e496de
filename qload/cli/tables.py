"""What every verb's output shares: the verdict in a line, the findings, the notes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from qload.cli.console import Paragraph, glued
from qload.cli.summary import verdict_line
from qload.cli.text import name, plural, safe

if TYPE_CHECKING:
    from qload.errors.causes import CauseGroup
    from qload.verify import Finding, Report

STYLE = {"ok": "bold green", "error": "red", "warning": "yellow"}


class LayerOutcome(Protocol):
    """A layer, or a tensor of none, with its outcome and the detail of it."""

    @property
    def name(self) -> str:
        """Name of the layer or tensor."""

    @property
    def outcome(self) -> str:
        """Outcome, as the report names it."""

    @property
    def detail(self) -> str:
        """Reason or place; "" where there is nothing to add."""


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
    yield from notes(report.notes)


def notes(texts: Iterable[str]) -> Iterator[RenderableType]:
    """Notes, those that differ in names and numbers alone as one."""
    from qload.errors.causes import group_texts

    for text in group_texts(texts):
        yield Text("note  ", "dim").append(_indented(text, 6), "none")


def outcomes(layers: "Iterable[LayerOutcome]", words: "Mapping[str, str]") -> Iterator[RenderableType]:
    """Layers with an outcome, those of one outcome and cause as one, with the detail of the first."""
    from qload.errors.causes import cause_of, group_by_cause

    groups = group_by_cause(
        layers,
        name=lambda layer: layer.name,
        cause=lambda layer: (layer.outcome, cause_of(layer.detail, layer.name)),
    )
    for group in groups:
        first, places = group.first, [glued(name(place)) for place in group.places()]
        title = Text(words.get(first.outcome, first.outcome), "red")
        if group.count == 1:
            yield title.append(f"  {places[0]}", "none")
        else:
            yield title.append(f"  {plural(group.count, 'layer')}", "none")
            yield from (Paragraph(Text(place), 4) for place in places)
        if first.detail:
            alike = len({layer.detail.replace(layer.name, "") for layer in group.items}) == 1
            named = "" if first.detail.startswith(first.name) else f"{name(first.name)}: "
            example = "" if alike else f"for example {named}"
            yield Paragraph(Text(safe(example + first.detail, keep="\n"), "dim"), 4)


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
    """Findings of one cause as one: a row where there is room for a table, else a paragraph."""

    findings: "Sequence[Finding]"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from qload.verify.report import group_findings

        groups = group_findings(self.findings)
        wide = self._wide(groups)
        roomy = options.max_width >= ROOMY
        if (
            roomy
            and Measurement.get(console, options.update(width=10_000), wide).minimum <= options.max_width
        ):
            yield wide
            return
        yield ""
        for group in groups:
            yield from _titles(group)
            yield Paragraph(_what(group), 4)
            yield ""

    def _wide(self, groups: "Sequence[CauseGroup[Finding]]") -> Table:
        """Columns as wide as their names, and messages at least as wide as their longest word."""
        shown = table()
        rows = [
            (
                _severity(group.first),
                Text(safe(group.first.rule)),
                Text("\n".join(_where(group)) or "-"),
                _what(group),
            )
            for group in groups
        ]
        for title, column in zip(("severity", "rule", "tensor, file"), zip(*rows, strict=True), strict=False):
            lines = [title, *(line for text in column for line in text.plain.split("\n"))]
            shown.add_column(title, width=max(map(cell_len, lines)))
        shown.add_column("message, remedy", min_width=MESSAGE_WIDTH)
        for row in rows:
            shown.add_row(*row)
        return shown


def _titles(group: "CauseGroup[Finding]") -> Iterator[Paragraph]:
    """Severity, rule and place in one line; several places each in a line of its own."""
    lines = list(map(glued, _where(group)))
    beside = lines if group.count <= 1 else []
    title = [_severity(group.first), *map(Text, (glued(safe(group.first.rule)), *beside))]
    yield Paragraph(Text("  ").join(title))
    if not beside:
        yield from (Paragraph(Text(line), 4) for line in lines)


def _severity(finding: "Finding") -> Text:
    return Text(safe(finding.severity), STYLE.get(finding.severity, ""))


def _where(group: "CauseGroup[Finding]") -> list[str]:
    """Tensors in short and how many there are, and the file if all are in one."""
    files = {finding.file for finding in group.items}
    file = group.first.file if len(files) == 1 and group.first.tensor else None
    lines = [name(place) for place in group.places()]
    if group.count > 1:
        lines.append(plural(group.count, "tensor" if group.first.tensor else "file"))
    return [*lines, name(file)] if file else lines


def _what(group: "CauseGroup[Finding]") -> Text:
    from qload.verify.report import shown_message

    what = Text(safe(shown_message(group), keep="\n"))
    if group.first.remedy:
        what.append("\nremedy  ", "green").append(_indented(group.first.remedy, 8), "none")
    return what


def _indented(text: str, by: int) -> str:
    return safe(text, keep="\n").replace("\n", "\n" + " " * by)
