"""The results of suites as one table: a row for each subject, from the files of `--qload-report`.

Reports are untrusted. `read_report` checks each value, and the page escapes all text.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from qload.configs.claims import FoundConfig
from qload.configs.section import Excerpt, validate
from qload.detect.config_reader import read_json
from qload.errors import ConfigError

MAX_FAILURE_LINES = 8  # beside the case and the replay
MAX_LINE_CHARACTERS = 160
MARKUP = re.compile(r"([\\`*\[\]<>|&])")  # of Markdown and HTML, within a cell
SUITES = {
    "LinearKernelSuite": "kernel",
    "ExpertsKernelSuite": "experts",
    "LoaderSuite": "loader",
    "PackerSuite": "packer",
    "WriterSuite": "writer",
}
Word = Annotated[str, Field(max_length=200)]


class CaseResult(Excerpt):
    """The result of one test of one case, an entry of `tests`."""

    test: Annotated[str, Field(min_length=1, max_length=1000)]
    case: Annotated[str, Field(min_length=1, max_length=200)]
    suite: Word
    outcome: Literal["passed", "failed", "skipped", "xfailed"]
    kind: Word = ""
    subject: Word = ""
    package: Word = ""
    version: Word = ""
    reason: str = ""
    failure: str = ""
    fault: Word | None = None
    replay: Annotated[str, Field(max_length=2000)] = ""
    error: float | None = Field(default=None, alias="error of bound", ge=0, allow_inf_nan=False)


class SuiteReport(Excerpt):
    """The content of a file of `--qload-report`."""

    version: Literal[1]
    tier: Word
    device: Word
    date: Word = ""
    machine: Word = ""
    isa: Word = ""
    python: Word = ""
    torch: Word = ""
    tests: list[CaseResult]

    @property
    def run(self) -> str:
        """The date, the machine and the versions, as in a page."""
        torch = f"torch {self.torch}" if self.torch else ""
        python = f"Python {self.python}" if self.python else ""
        return ", ".join(part for part in (self.date, self.machine, self.isa, torch, python) if part)


def read_report(path: Path) -> SuiteReport:
    """Read a file of `--qload-report`; ConfigError or StorageError for other content."""
    try:
        return validate(SuiteReport, FoundConfig(path.name, "", read_json(path)))
    except ConfigError as error:
        remedy = f"remedy   write a report: pytest --qload-report={path.name}"
        raise ConfigError(error.file, error.key, error.expected, error.got, remedy) from error


@dataclass(frozen=True)
class Failure:
    """Failed tests of a subject with one diagnosis.

    Attributes
    ----------
    test, case
        The first of them, and its case.
    fault
        The fault class of the diagnosis, or "".
    lines
        The first lines of the message.
    count
        The number of failed tests.
    known
        Whether all are expected failures.
    replay
        The command that repeats the first one.
    """

    test: str
    case: str
    fault: str
    lines: tuple[str, ...]
    count: int
    known: bool
    replay: str


@dataclass(frozen=True)
class Row:
    """The results of one subject in one run.

    Attributes
    ----------
    subject, package, version, suite
        What is tested, its distribution and version, and the kind of the suite.
    run
        The number of the run in `Scoreboard.runs`.
    cases
        The number of cases with a passed or failed test.
    passed, failed
        Numbers of tests; `failed` includes expected failures.
    skipped
        The number of cases by the reason for which tests of them are skipped.
    error
        The largest error in units of the bound of rounding; None if no test measures it.
    failures
        By diagnosis.
    replay
        The command that repeats all tests of the row.
    """

    subject: str
    package: str
    version: str
    suite: str
    run: int
    cases: int
    passed: int
    failed: int
    skipped: dict[str, int]
    error: float | None
    failures: tuple[Failure, ...]
    replay: str

    @property
    def owner(self) -> str:
        """The distribution and its version."""
        return f"{self.package} {self.version}".strip()

    @property
    def result(self) -> str:
        """ "passes", "not run", or the number of failed tests."""
        if self.failed:
            return f"{self.failed} of {self.passed + self.failed} tests fail"
        return "passes" if self.cases else "not run"


@dataclass(frozen=True)
class Scoreboard:
    """Rows of all subjects, and a description of each run."""

    runs: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def failing(self) -> tuple[Row, ...]:
        """The rows with failed tests."""
        return tuple(row for row in self.rows if row.failed)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        rows = [{**asdict(row), "result": row.result} for row in self.rows]
        return {"runs": list(self.runs), "rows": rows}

    def as_markdown(self) -> str:
        """Return the page."""
        return "\n".join(_page_lines(self))


def make_scoreboard(reports: Iterable[SuiteReport]) -> Scoreboard:
    """Make the scoreboard of `reports`, with rows sorted by package and subject."""
    runs, rows = [], []
    for number, report in enumerate(reports):
        runs.append(report.run)
        subjects: dict[str, list[CaseResult]] = {}
        for test in report.tests:
            subjects.setdefault(test.test.partition("[")[0].rpartition("::")[0], []).append(test)
        rows += [_make_row(node, tests, report, number) for node, tests in subjects.items()]
    return Scoreboard(tuple(runs), tuple(sorted(rows, key=lambda row: (row.package, row.subject, row.run))))


def _make_row(node: str, tests: list[CaseResult], report: SuiteReport, run: int) -> Row:
    first = tests[0]
    ran = [test for test in tests if test.outcome != "skipped"]
    failed = [test for test in ran if test.outcome != "passed"]
    skipped = Counter(reason for reason, _ in {(t.reason, t.case) for t in tests if t.outcome == "skipped"})
    errors = [test.error for test in ran if test.error is not None]
    return Row(
        subject=first.subject or first.suite,
        package=first.package,
        version=first.version,
        suite=SUITES.get(first.kind, first.kind),
        run=run,
        cases=len({test.case for test in ran}),
        passed=len(ran) - len(failed),
        failed=len(failed),
        skipped=dict(sorted(skipped.items())),
        error=max(errors, default=None),
        failures=tuple(_group_failures(failed, report)),
        replay=_replay(node, report),
    )


def _replay(node: str, report: SuiteReport) -> str:
    tier = f" --qload-tier={report.tier}" if report.tier not in ("", "default") else ""
    device = f" --qload-device={report.device}" if report.device not in ("", "cpu") else ""
    return f"pytest '{node}'{tier}{device}"


def _group_failures(failed: list[CaseResult], report: SuiteReport) -> Iterator[Failure]:
    """One entry for each diagnosis of a case; cases without one share an entry for each test function."""
    named, groups = {test.case: test.fault for test in failed if test.fault}, dict[str, list[CaseResult]]()
    for test in sorted(failed, key=lambda test: not test.fault):
        name = test.test.partition("[")[0].rpartition("::")[2]
        groups.setdefault(named.get(test.case) or name, []).append(test)
    for tests in groups.values():
        first = tests[0]
        lines = [line[:MAX_LINE_CHARACTERS] for line in (first.failure or first.reason).splitlines()]
        yield Failure(
            test=first.test,
            case=first.case,
            fault=first.fault or "",
            lines=tuple(lines[:MAX_FAILURE_LINES]),
            count=len(tests),
            known=all(test.outcome == "xfailed" for test in tests),
            replay=first.replay or _replay(first.test, report),
        )


TITLES = ("subject", "version", "suite", "cases", "skipped", "error / bound", "result", "run", "replay")


def _page_lines(board: Scoreboard) -> Iterator[str]:
    yield from ("# Scoreboard", "")
    yield "Printed by `qload scoreboard --markdown` from the reports of these runs:"
    yield ""
    yield from (f"{number}. {_plain(run)}" for number, run in enumerate(board.runs, 1))
    yield from ("", _table_line(TITLES), _table_line(("---",) * len(TITLES)))
    for row in board.rows:
        error = "" if row.error is None else f"{row.error:.3g}"
        reasons = "; ".join(f"{count}: {_plain(reason)}" for reason, count in row.skipped.items())
        cells = (_plain(row.subject), _plain(row.owner), _plain(row.suite), str(row.cases), reasons, error)
        yield _table_line((*cells, row.result, str(row.run + 1), _code(row.replay)))
    for row in board.failing:
        yield from ("", f"## {_plain(row.subject)}")
        for failure in row.failures:
            known = ", known" if failure.known else ""
            title = f"{failure.fault or 'no known fault'}: {failure.count} tests{known}"
            yield from ("", _plain(title), "", "```text", f"{_fenced(failure.case)}")
            yield from (_fenced(line) for line in failure.lines)
            yield from (_fenced(failure.replay), "```")
    yield ""


def _table_line(cells: Iterable[str]) -> str:
    return f"|{'|'.join(cells)}|"


def _plain(text: str) -> str:
    """Escape markup, and join the lines of a text."""
    return MARKUP.sub(r"\\\1", " ".join(_printable(text).split())[:MAX_LINE_CHARACTERS])


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _code(text: str) -> str:
    """Format a command as code in a cell; a quote or a bar in it is escaped text instead."""
    return f"`{text}`" if text.isprintable() and not {"`", "|"} & {*text} else _plain(text)


def _fenced(text: str) -> str:
    """Format a line of a code block, which it cannot end."""
    return _printable(text).replace("```", "'''")
