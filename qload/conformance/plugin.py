"""The pytest plugin: command-line options of the suites. Without an option it imports nothing but pytest."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

UNUSED_LINES = pytest.StashKey[list[str]]()
TIERS = ("smoke", "default", "gpu", "exhaustive")
LINE_FORM = (
    "CASE LINK REASON, such as: gptq.v2.w4.g128.k256n128 https://example.org/issues/1 zero points are v1's"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the four options to `parser`."""
    group = parser.getgroup("qload", "conformance suites of qload")
    group.addoption(
        "--qload-tier",
        choices=TIERS,
        help="number of cases: smoke (seconds), default (a minute), gpu (large layers too), or exhaustive",
    )
    group.addoption("--qload-device", metavar="DEVICE", help="device of tensors: cpu (default), cuda, cuda:1")
    group.addoption(
        "--qload-xfails",
        type=Path,
        metavar="FILE",
        help="expected failures, a line each: CASE LINK REASON; a case that passes fails the run",
    )
    group.addoption("--qload-report", type=Path, metavar="FILE", help="write the result of each case as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Register the report of the `config`, if it asks for one, in the process that has all results."""
    path = config.getoption("qload_report")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(CaseReport(config, path), "qload-report")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the `items` that the file of the `config` lists as expected failures."""
    path = config.getoption("qload_xfails")
    if path is None:
        return
    from qload.errors import ArgumentError

    try:
        expected = read_expected_failures(path)
    except ArgumentError as error:
        raise pytest.UsageError(str(error)) from None
    unused = set(expected)
    for item in items:
        case: Any = getattr(getattr(item, "callspec", None), "params", {}).get("case")
        test = getattr(item, "originalname", item.name)
        for line in expected if hasattr(case, "traits") else ():
            if line.matches(test, case.id):
                item.add_marker(pytest.mark.xfail(reason=f"{line.reason} ({line.link})", strict=True))
                unused.discard(line)
    config.stash[UNUSED_LINES] = sorted(line.case for line in unused)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the lines of the file that match no test; `terminalreporter` and `config` are pytest's."""
    unused = config.stash.get(UNUSED_LINES, [])
    if unused:
        terminalreporter.write_line(f"qload: no collected test matches {', '.join(unused)}")


class CaseReport:
    """The result of each case, written as JSON to a `path` at the end of the session; `config`: of pytest."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config, self.path = config, path
        self.tests: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a `report` of a suite's test."""
        recorded: list[Any] = [value for name, value in report.user_properties if name == "qload"]
        if not recorded or not (report.when == "call" or report.skipped or report.failed):
            return
        reason = getattr(report, "wasxfail", "")
        if report.skipped and not reason:
            assert isinstance(report.longrepr, tuple)  # path, line, reason
            reason = report.longrepr[2].removeprefix("Skipped: ")
        expected = hasattr(report, "wasxfail") and report.skipped
        failure = recorded[-1].get("failure") or _last_line(report.longreprtext)
        entry = {
            "test": report.nodeid,
            **recorded[-1],
            "outcome": "xfailed" if expected else report.outcome,
            **({"reason": reason} if reason else {}),
            **({"failure": failure} if report.failed or expected else {}),
        }
        self.tests = [each for each in self.tests if each["test"] != report.nodeid]
        self.tests.append(entry)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        content = {
            "version": 1,
            "tier": self.config.getoption("qload_tier") or "default",
            "device": self.config.getoption("qload_device") or "cpu",
            **_describe_run(),
            "outcomes": dict(Counter(test["outcome"] for test in self.tests)),
            "tests": sorted(self.tests, key=lambda test: test["test"]),
        }
        self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _last_line(text: str) -> str:
    """Return the last line of the `text` of an error that no check raised, or ""."""
    lines = [line for line in text.splitlines() if line.startswith("E  ")]
    return lines[-1].removeprefix("E").strip() if lines else ""


def _describe_run() -> dict[str, str]:
    """Return the date, the machine, its instruction set and the versions of a run."""
    torch = sys.modules.get("torch")  # absent if no test ran
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "isa": torch.backends.cpu.get_cpu_capability() if torch else "",
        "python": platform.python_version(),
        "torch": str(torch.__version__) if torch else "",
    }


@dataclass(frozen=True)
class ExpectedFailure:
    """A line of the file of expected failures.

    Attributes
    ----------
    case
        The id of a case, or `test[id]`; an asterisk stands for any text.
    link, reason
        The report of the failure, and a description.
    """

    case: str
    link: str
    reason: str

    def matches(self, test: str, case: str) -> bool:
        """Return True if the line is about a `test`, by its name, of a `case`, by its id."""
        pattern = self.case.replace("[", "[[]") if "[" in self.case else self.case
        return fnmatchcase(f"{test}[{case}]" if "[" in self.case else case, pattern)


def read_expected_failures(path: Path) -> tuple[ExpectedFailure, ...]:
    """Read the lines of a file at `path`, without empty ones and comments that begin with #.

    ArgumentError for a missing file, and for a line without a link or a reason.
    """
    from qload.errors import ArgumentError

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("--qload-xfails", "a text file", f"{path}: {error}") from None
    expected = []
    for number, line in enumerate(lines, 1):
        case, *rest = line.split(maxsplit=2)[:3] or [""]
        if not case or case.startswith("#"):
            continue
        if len(rest) != 2 or not rest[0].startswith(("https://", "http://")):
            raise ArgumentError(f"--qload-xfails: {path.name}, line {number}", LINE_FORM, repr(line))
        expected.append(ExpectedFailure(case, *rest))
    return tuple(expected)
