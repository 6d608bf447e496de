"""Tables and paragraphs on a terminal: names in full, and no markup from a checkpoint."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from qload.cli.text import escape, escape_name, format_count, verdict_line

if TYPE_CHECKING:
    from qload.errors.reporting import CauseGroup
    from qload.verify import Finding, Report

NON_TERMINAL_COLUMNS = 120  # width of output in a pipe or a file
MIN_TABLE_COLUMNS = 110  # a narrower terminal gets findings as paragraphs
MIN_MESSAGE_COLUMNS = 44  # of a finding in a table
WORD = re.compile(r"[^ ]+ *")
NO_BREAK_SPACE = "\xa0"  # printed as an ordinary space
VERDICT_STYLES = {"ok": "bold green", "error": "red", "warning": "yellow"}


@dataclass(frozen=True)
class Paragraph:
    """Text wrapped between words; a word wider than the console is never broken.

    `indent`: columns in front of each line.
    """

    text: Text
    indent: int = 0

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self.text.split(allow_blank=True):
            for part in line.divide(_find_breaks(line.plain, options.max_width - self.indent)):
                part.rstrip()
                part.plain = part.plain.replace(NO_BREAK_SPACE, " ")
                line_text = Text(" " * self.indent if part else "", no_wrap=True, overflow="ignore")
                yield line_text.append_text(part)


def join_words(text: str) -> str:
    """Join a text into one word of a paragraph by no-break spaces."""
    return text.replace(" ", NO_BREAK_SPACE)


def _find_breaks(line: str, width: int) -> list[int]:
    """Find the offsets for line breaks; leading spaces stay with the first word."""
    breaks, start = list[int](), 0
    for word in list(WORD.finditer(line))[1:]:
        if cell_len(line[start : word.end()].rstrip()) > width:
            breaks.append(start := word.start())
    return breaks


class _Console(Console):
    def print(self, *objects: Any, **settings: Any) -> None:
        """Print texts as paragraphs."""
        paragraphs = [Paragraph(item) if isinstance(item, Text) else item for item in objects]
        super().print(*paragraphs, **{"crop": False, **settings})

    def on_broken_pipe(self) -> None:
        """Raise the error to the command group: rich exits with 1, the code for findings."""
        raise


def stdout() -> Console:
    """Create a console for data."""
    return _create_console(sys.stdout)


def stderr() -> Console:
    """Create a console for progress."""
    return _create_console(sys.stderr)


def is_color_disabled() -> bool:
    """Return True if NO_COLOR forbids escape sequences: colors, bold text and cursor movement."""
    return bool(os.environ.get("NO_COLOR"))


def _create_console(file: TextIO) -> Console:
    if hasattr(file, "reconfigure"):
        file.reconfigure(errors="backslashreplace")  # for names outside of the terminal's encoding
    width = None if file.isatty() or "COLUMNS" in os.environ else NON_TERMINAL_COLUMNS
    # Under NO_COLOR rich still prints bold and dim text; without a color system it prints neither.
    return _Console(
        file=file,
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        color_system=None if is_color_disabled() else "auto",
    )


class LayerOutcome(Protocol):
    """Outcome of a layer, or of a tensor outside of all layers."""

    @property
    def name(self) -> str:
        """Name of the layer or tensor."""

    @property
    def outcome(self) -> str:
        """Outcome, a word of the report."""

    @property
    def detail(self) -> str:
        """Reason or place, or ""."""


def color_verdict(verdict: str, line: str) -> Text:
    """Color the verdict at the beginning of a line."""
    return Text(verdict, VERDICT_STYLES.get(verdict, "bold red")).append(line.removeprefix(verdict), "none")


def verdict_text(report: "Report") -> Text:
    """Format a verdict: ok  ./model: 21 layers, 7 plain tensors, 100 % of 1.1 MiB explained."""
    return color_verdict(report.verdict, verdict_line(report))


def report_heading(report: "Report") -> Text:
    """Format the path as the heading of one of several reports."""
    return Text(f"\n{escape(report.path)}", "bold")


def finding_tables(report: "Report") -> Iterator[RenderableType]:
    """Format the findings of a report, and its notes below them."""
    if report.findings:
        yield FindingTable(report.findings)
    yield from note_texts(report.notes)


def note_texts(texts: Iterable[str]) -> Iterator[RenderableType]:
    """Format notes; notes that differ only in names and numbers become one."""
    from qload.errors.reporting import group_texts

    for text in group_texts(texts):
        yield Text("note  ", "dim").append(_indent(text, 6), "none")


def outcome_texts(layers: "Iterable[LayerOutcome]", words: "Mapping[str, str]") -> Iterator[RenderableType]:
    """Format layers by outcome and cause: the names of each group, and the detail of its first layer."""
    from qload.errors.reporting import cause_of, group_by_cause

    groups = group_by_cause(
        layers,
        name=lambda layer: layer.name,
        cause=lambda layer: (layer.outcome, cause_of(layer.detail, layer.name)),
    )
    for group in groups:
        first, places = group.first, [join_words(escape_name(place)) for place in group.places()]
        title = Text(words.get(first.outcome, first.outcome), "red")
        if group.count == 1:
            yield title.append(f"  {places[0]}", "none")
        else:
            yield title.append(f"  {format_count(group.count, 'layer')}", "none")
            yield from (Paragraph(Text(place), 4) for place in places)
        if first.detail:
            equal = len({layer.detail.replace(layer.name, "") for layer in group.items}) == 1
            prefix = "" if first.detail.startswith(first.name) else f"{escape_name(first.name)}: "
            example = "" if equal else f"for example {prefix}"
            yield Paragraph(Text(escape(example + first.detail, keep="\n"), "dim"), 4)


def empty_table() -> Table:
    """Create a table in the common style."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


@dataclass(frozen=True)
class NamedRow:
    """Table row of facts under a name.

    `count`: number of items in the row. `style`: rich style of the row.
    """

    name: str
    facts: Sequence[Text]
    count: int = 1
    style: str = ""


@dataclass(frozen=True)
class NameTable:
    """Table with a row per name; on a narrow console a line per name, and its facts below it.

    `title`: title of the names. `columns`: titles of the facts. `right`: right-aligned columns.
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
        table = empty_table()
        table.add_column(self.title)
        has_counts = any(row.count > 1 for row in self.rows)
        if has_counts:
            table.add_column("count", justify="right")
        for column in self.columns:
            table.add_column(column, justify="right" if column in self.right else "left")
        for row in self.rows:
            count = [str(row.count) if row.count > 1 else ""] if has_counts else []
            table.add_row(Text(row.name), *count, *row.facts, style=row.style, end_section=bool(row.style))
        return table

    def _narrow(self, width: int) -> Iterator[RenderableType]:
        """Format facts in columns if they fit, else as a list with their titles."""
        cells = [[Text(column, "bold") for column in self.columns], *(row.facts for row in self.rows)]
        widths = [max(cell_len(cell.plain) for cell in column) for column in zip(*cells, strict=True)]
        aligned = sum(widths) + 2 * len(widths) <= width
        yield ""
        if aligned:
            yield Paragraph(_align_cells(cells[0], widths))
        for row in self.rows:
            count = f"  x{row.count}" if row.count > 1 else ""
            yield Paragraph(Text(f"{join_words(row.name)}{count}", row.style))
            if aligned:
                yield Paragraph(_align_cells(row.facts, widths))
            else:
                yield Paragraph(_label_cells(self.columns, row.facts), 2)
        yield ""


def _align_cells(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    line = Text("  ")
    for cell, width in zip(cells, widths, strict=True):
        line.append_text(cell).append(" " * (width - cell_len(cell.plain) + 2))
    line.rstrip()
    return line


def _label_cells(titles: Sequence[str], cells: Sequence[Text]) -> Text:
    """Format cells as a list with their titles, without empty cells: `format gptq, bits 4`."""
    facts = []
    for title, cell in zip(titles, cells, strict=True):
        if cell:
            fact = Text(f"{title} ", "dim").append_text(cell)
            fact.plain = join_words(fact.plain)
            facts.append(fact)
    return Text(", ").join(facts)


@dataclass(frozen=True)
class FindingTable:
    """Findings grouped by cause: a table row per cause, or a paragraph on a narrow console."""

    findings: "Sequence[Finding]"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from qload.verify.report import group_findings

        groups = group_findings(self.findings)
        wide = self._wide(groups)
        min_columns = Measurement.get(console, options.update(width=10_000), wide).minimum
        if options.max_width >= max(MIN_TABLE_COLUMNS, min_columns):
            yield wide
            return
        yield ""
        for group in groups:
            yield from _finding_title(group)
            yield Paragraph(_message_text(group), 4)
            yield ""

    def _wide(self, groups: "Sequence[CauseGroup[Finding]]") -> Table:
        """Create a table with columns as wide as their names; only messages are wrapped."""
        table = empty_table()
        rows = [
            (
                _severity_text(group.first),
                Text(escape(group.first.rule)),
                Text("\n".join(_place_lines(group)) or "-"),
                _message_text(group),
            )
            for group in groups
        ]
        for title, column in zip(("severity", "rule", "tensor, file"), zip(*rows, strict=True), strict=False):
            lines = [title, *(line for text in column for line in text.plain.split("\n"))]
            table.add_column(title, width=max(map(cell_len, lines)))
        table.add_column("message, remedy", min_width=MIN_MESSAGE_COLUMNS)
        for row in rows:
            table.add_row(*row)
        return table


def _finding_title(group: "CauseGroup[Finding]") -> Iterator[Paragraph]:
    """Format severity, rule and place in one line; several places get a line each."""
    places = list(map(join_words, _place_lines(group)))
    single = places if group.count <= 1 else []
    title = [_severity_text(group.first), *map(Text, (join_words(escape(group.first.rule)), *single))]
    yield Paragraph(Text("  ").join(title))
    if not single:
        yield from (Paragraph(Text(place), 4) for place in places)


def _severity_text(finding: "Finding") -> Text:
    return Text(escape(finding.severity), VERDICT_STYLES.get(finding.severity, ""))


def _place_lines(group: "CauseGroup[Finding]") -> list[str]:
    """List merged tensor names, their number, and the file if it is the same for all."""
    files = {finding.file for finding in group.items}
    file = group.first.file if len(files) == 1 and group.first.tensor else None
    lines = [escape_name(place) for place in group.places()]
    if group.count > 1:
        lines.append(format_count(group.count, "tensor" if group.first.tensor else "file"))
    return [*lines, escape_name(file)] if file else lines


def _message_text(group: "CauseGroup[Finding]") -> Text:
    from qload.verify.report import shown_message

    message = Text(escape(shown_message(group), keep="\n"))
    if group.first.remedy:
        message.append("\nremedy  ", "green").append(_indent(group.first.remedy, 8), "none")
    return message


def _indent(text: str, columns: int) -> str:
    return escape(text, keep="\n").replace("\n", "\n" + " " * columns)
