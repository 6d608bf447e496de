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

NON_TERMINAL_COLUMNS = 120  # columns of a console that is no terminal
WORD = re.compile(r"[^ ]+ *")
NO_BREAK_SPACE = "\xa0"  # a space that is no place to break a line, and is printed as an ordinary one


@dataclass(frozen=True)
class Paragraph:
    """Text that is wrapped between words alone; a word wider than the console stays whole.

    `indent`: columns in front of each line.
    """

    text: Text
    indent: int = 0

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self.text.split(allow_blank=True):
            for part in line.divide(_find_breaks(line.plain, options.max_width - self.indent)):
                part.rstrip()
                part.plain = part.plain.replace(NO_BREAK_SPACE, " ")
                whole = Text(" " * self.indent if part else "", no_wrap=True, overflow="ignore")
                yield whole.append_text(part)


def join_words(text: str) -> str:
    """The text as one word of a paragraph, whatever spaces are in it."""
    return text.replace(" ", NO_BREAK_SPACE)


def _find_breaks(line: str, width: int) -> list[int]:
    """Offsets at which a line is broken; what a line begins with stays before its first word."""
    breaks, start = list[int](), 0
    for word in list(WORD.finditer(line))[1:]:
        if cell_len(line[start : word.end()].rstrip()) > width:
            breaks.append(start := word.start())
    return breaks


class _Console(Console):
    def print(self, *objects: Any, **settings: Any) -> None:
        """Print texts as paragraphs."""
        whole = [Paragraph(each) if isinstance(each, Text) else each for each in objects]
        super().print(*whole, **{"crop": False, **settings})

    def on_broken_pipe(self) -> None:
        """Raise it to the group of verbs: rich itself would leave with 1, which means findings here."""
        raise


def stdout() -> Console:
    """For data."""
    return _create_console(sys.stdout)


def stderr() -> Console:
    """For progress."""
    return _create_console(sys.stderr)


def is_color_disabled() -> bool:
    """Whether NO_COLOR asks for no escape sequence: no colour, no bold, no cursor that moves."""
    return bool(os.environ.get("NO_COLOR"))


def _create_console(file: TextIO) -> Console:
    if hasattr(file, "reconfigure") and "utf" not in (file.encoding or "").lower():
        file.reconfigure(errors="backslashreplace")  # a name outside of the terminal's alphabet is no crash
    fixed = None if file.isatty() or "COLUMNS" in os.environ else NON_TERMINAL_COLUMNS
    # NO_COLOR leaves rich its bold and dim; without a color system rich has neither.
    return _Console(
        file=file,
        width=fixed,
        markup=False,
        emoji=False,
        highlight=False,
        color_system=None if is_color_disabled() else "auto",
    )


VERDICT_STYLES = {"ok": "bold green", "error": "red", "warning": "yellow"}


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


MIN_TABLE_COLUMNS = 110  # columns from which findings are a table
MIN_MESSAGE_COLUMNS = 44  # columns that a message has at least beside names


def verdict_text(report: "Report") -> Text:
    """ok  ./model: 21 layers, 7 plain tensors, 100 % of 1.1 MiB explained."""
    rest = verdict_line(report).removeprefix(report.verdict)
    return Text(report.verdict, VERDICT_STYLES.get(report.verdict, "bold red")).append(rest, "none")


def report_heading(report: "Report") -> Text:
    """The path, above what is one of several reports."""
    return Text(f"\n{escape(report.path)}", "bold")


def finding_tables(report: "Report") -> Iterator[RenderableType]:
    """The findings, if there are any, and the notes under them."""
    if report.findings:
        yield FindingTable(report.findings)
    yield from note_texts(report.notes)


def note_texts(texts: Iterable[str]) -> Iterator[RenderableType]:
    """Notes, those that differ in names and numbers alone as one."""
    from qload.errors.reporting import group_texts

    for text in group_texts(texts):
        yield Text("note  ", "dim").append(_indent(text, 6), "none")


def outcome_texts(layers: "Iterable[LayerOutcome]", words: "Mapping[str, str]") -> Iterator[RenderableType]:
    """Layers with an outcome, those of one outcome and cause as one, with the detail of the first."""
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
            alike = len({layer.detail.replace(layer.name, "") for layer in group.items}) == 1
            named = "" if first.detail.startswith(first.name) else f"{escape_name(first.name)}: "
            example = "" if alike else f"for example {named}"
            yield Paragraph(Text(escape(example + first.detail, keep="\n"), "dim"), 4)


def empty_table() -> Table:
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
        shown = empty_table()
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
    """`format gptq, bits 4`; without cells that are empty."""
    facts = []
    for title, cell in zip(titles, cells, strict=True):
        if cell:
            fact = Text(f"{title} ", "dim").append_text(cell)
            fact.plain = join_words(fact.plain)
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
        roomy = options.max_width >= MIN_TABLE_COLUMNS
        if (
            roomy
            and Measurement.get(console, options.update(width=10_000), wide).minimum <= options.max_width
        ):
            yield wide
            return
        yield ""
        for group in groups:
            yield from _finding_title(group)
            yield Paragraph(_message_text(group), 4)
            yield ""

    def _wide(self, groups: "Sequence[CauseGroup[Finding]]") -> Table:
        """Columns as wide as their names, and messages at least as wide as their longest word."""
        shown = empty_table()
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
            shown.add_column(title, width=max(map(cell_len, lines)))
        shown.add_column("message, remedy", min_width=MIN_MESSAGE_COLUMNS)
        for row in rows:
            shown.add_row(*row)
        return shown


def _finding_title(group: "CauseGroup[Finding]") -> Iterator[Paragraph]:
    """Severity, rule and place in one line; several places each in a line of its own."""
    lines = list(map(join_words, _place_lines(group)))
    beside = lines if group.count <= 1 else []
    title = [_severity_text(group.first), *map(Text, (join_words(escape(group.first.rule)), *beside))]
    yield Paragraph(Text("  ").join(title))
    if not beside:
        yield from (Paragraph(Text(line), 4) for line in lines)


def _severity_text(finding: "Finding") -> Text:
    return Text(escape(finding.severity), VERDICT_STYLES.get(finding.severity, ""))


def _place_lines(group: "CauseGroup[Finding]") -> list[str]:
    """Tensors in short and how many there are, and the file if all are in one."""
    files = {finding.file for finding in group.items}
    file = group.first.file if len(files) == 1 and group.first.tensor else None
    lines = [escape_name(place) for place in group.places()]
    if group.count > 1:
        lines.append(format_count(group.count, "tensor" if group.first.tensor else "file"))
    return [*lines, escape_name(file)] if file else lines


def _message_text(group: "CauseGroup[Finding]") -> Text:
    from qload.verify.report import shown_message

    what = Text(escape(shown_message(group), keep="\n"))
    if group.first.remedy:
        what.append("\nremedy  ", "green").append(_indent(group.first.remedy, 8), "none")
    return what


def _indent(text: str, by: int) -> str:
    return escape(text, keep="\n").replace("\n", "\n" + " " * by)
