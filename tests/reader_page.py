"""Page of the programs that read each format, from `docs/readers.toml`: `python -m tests.reader_page`."""

import posixpath
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass

from qload.checkpoint import format_label
from qload.detect.config_reader import described_formats
from qload.detect.methods import METHODS
from qload.detect.signatures import METHODS_ELSEWHERE
from qload.formats import FORMATS
from tests.paths import ROOT

PAGE, DATA = ROOT / "docs" / "readers.md", ROOT / "docs" / "readers.toml"
REFUSED = "(refused)"
HEAD = """\
# Readers of each format

These answers come from sources, without a run. Numbers lead to them, a plain "no" to the list of methods in
the last row. Other words name the part, or the package, that is read. Empty: not determined."""


@dataclass(frozen=True)
class Answer:
    """Answer for a format in a program, and the file that shows it."""

    reads: str
    file: str = ""


@dataclass(frozen=True)
class Cell:
    """Answer for all pairs of its formats and methods; an empty set stands for all of them."""

    answer: Answer
    formats: frozenset[str]
    methods: frozenset[str]

    def covers(self, fmt: str, method: str) -> bool:
        return (not self.formats or fmt in self.formats) and (not self.methods or method in self.methods)


@dataclass(frozen=True)
class Program:
    """Program of one version: its cells, and the file that lists its methods."""

    name: str
    version: str
    root: str
    registry: str
    cells: tuple[Cell, ...]

    def answers(self, fmt: str, method: str) -> list[Answer]:
        """Return the answers of all cells for a pair, or a "no" by the registry."""
        found = [cell.answer for cell in self.cells if cell.covers(fmt, method)]
        return found or [Answer("no", self.registry)]

    def path(self, file: str) -> str:
        """Return the path of a file in the program's package."""
        return f"`{posixpath.normpath(self.root + file)}`"


def read_programs() -> list[Program]:
    """Read the data file; an unknown or a missing key raises TypeError."""
    programs = []
    for table in tomllib.loads(DATA.read_text())["programs"]:
        cells = []
        for cell in table.pop("cells"):
            formats, methods = (frozenset(cell.pop(key, ())) for key in ("formats", "methods"))
            cells.append(Cell(Answer(**cell), formats, methods))
        programs.append(Program(**table, cells=tuple(cells)))
    return programs


def pairs() -> list[tuple[str, str]]:
    """Return each format with its methods, then the methods that qload refuses."""
    read = [
        (weight_type.format, method)
        for weight_type in FORMATS
        for method in ([""] if weight_type.plain else METHODS)
        if weight_type.plain or weight_type in described_formats(method)
    ]
    return read + [("", method) for method in METHODS_ELSEWHERE]


def page() -> str:
    """Return the Markdown page: a table of answers, and a table of their sources."""
    programs = read_programs()
    numbers: dict[str, int] = {}  # path -> number of a source

    def text(program: Program, answer: Answer) -> str:
        if answer.reads == "unknown" or (answer.reads, answer.file) == ("no", program.registry):
            return answer.reads.removeprefix("unknown")
        source = numbers.setdefault(program.path(answer.file), len(numbers) + 1)
        return f"{answer.reads}<sup>{source}</sup>"

    rows: dict[tuple[str, ...], list[str]] = {}  # the methods of equal rows share one
    for fmt, method in pairs():
        cells = (text(program, program.answers(fmt, method)[0]) for program in programs)
        rows.setdefault((format_label(fmt) if fmt else REFUSED, *cells), []).append(method)
    answers = [(label, "<br>".join(methods), *cells) for (label, *cells), methods in rows.items()]
    answers.append(("list", "", *(program.path(program.registry) for program in programs)))
    heads = ("format", "`quant_method`", *(f"{program.name} {program.version}" for program in programs))
    sources = [(str(number), path) for path, number in numbers.items()]
    return "\n".join((HEAD, "", _table(heads, answers), _table(("", "source"), sources)))


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"|{'|'.join(row)}|\n" for row in (heads, ("---",) * len(heads), *rows))


if __name__ == "__main__":
    PAGE.write_text(page())
