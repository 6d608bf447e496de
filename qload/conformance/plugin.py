"""The pytest plugin: what suites are asked for on the command line. Unused it imports nothing but pytest."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

UNMET = pytest.StashKey[list[str]]()
TIERS = ("smoke", "default", "gpu", "exhaustive")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The four options, of a `parser`."""
    group = parser.getgroup("qload", "conformance suites of qload")
    group.addoption(
        "--qload-tier",
        choices=TIERS,
        help="how many cases: smoke (seconds), default (a minute), gpu (large layers too), or exhaustive",
    )
    group.addoption("--qload-device", metavar="DEVICE", help="where tensors lie: cpu (default), cuda, cuda:1")
    group.addoption(
        "--qload-xfails",
        type=Path,
        metavar="FILE",
        help="cases that are expected to fail, a line each: CASE LINK REASON; one that passes fails the run",
    )
    group.addoption("--qload-report", type=Path, metavar="FILE", help="write what came of each case as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """A report is kept where the `config` asks for one, by the process that has all results."""
    path = config.getoption("qload_report")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(CaseReport(config, path), "qload-report")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark those `items` that the file of the `config` expects to fail."""
    path = config.getoption("qload_xfails")
    if path is None:
        return
    from qload.conformance.xfails import read
    from qload.errors import ArgumentError

    try:
        expected = read(path)
    except ArgumentError as error:
        raise pytest.UsageError(str(error)) from None
    unmet = set(expected)
    for item in items:
        case: Any = getattr(getattr(item, "callspec", None), "params", {}).get("case")
        test = getattr(item, "originalname", item.name)
        for line in expected if hasattr(case, "traits") else ():
            if line.meets(test, case.id):
                item.add_marker(pytest.mark.xfail(reason=f"{line.reason} ({line.link})", strict=True))
                unmet.discard(line)
    config.stash[UNMET] = sorted(line.case for line in unmet)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which lines of the file met no test: `terminalreporter` and `config` are pytest's."""
    unmet = config.stash.get(UNMET, [])
    if unmet:
        terminalreporter.write_line(f"qload: no collected test is met by {', '.join(unmet)}")


class CaseReport:
    """What came of each case, written as JSON to a `path` when all have run; `config`: of pytest."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config, self.path = config, path
        self.tests: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take down one `report` of those that suites made."""
        said: list[Any] = [value for name, value in report.user_properties if name == "qload"]
        if not said or not (report.when == "call" or report.skipped or report.failed):
            return
        reason = getattr(report, "wasxfail", "")
        if report.skipped and not reason and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        known = hasattr(report, "wasxfail") and report.skipped
        entry = {
            "test": report.nodeid,
            **said[-1],
            "outcome": "xfailed" if known else report.outcome,
            **({"reason": reason} if reason else {}),
        }
        self.tests = [each for each in self.tests if each["test"] != report.nodeid]
        self.tests.append(entry)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        made = {
            "version": 1,
            "tier": self.config.getoption("qload_tier") or "default",
            "device": self.config.getoption("qload_device") or "cpu",
            "outcomes": dict(Counter(test["outcome"] for test in self.tests)),
            "tests": sorted(self.tests, key=lambda test: test["test"]),
        }
        self.path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
