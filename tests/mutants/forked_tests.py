"""Runs of pytest in forks of one process: torch is imported once, and a run starts in half a second.

    python -m tests.mutants.forked_tests

in a copy of the project reads requests from lines, `{"options": [...], "tests": [...], "seconds": ...}`, and
answers each with a line `{"failed": ...}`: the first failed test, the end of a broken run, or null. It
imports no qload itself.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = (
    "torch",
    "torch._dynamo",
    "numpy",
    "safetensors.torch",
    "hypothesis",
    "syrupy",
    "click",
    "rich.console",
    "rich.table",
)
MISSING_TESTS = (4, 5)  # exit codes of pytest without a named test, as a mutant may change its name
POLL_SECONDS = 0.02


class FirstFailure:
    """A plugin of pytest that writes the id of the first failed test or file to a `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failed phase of a test."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file without an import."""
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid)


def main() -> None:
    """Answer requests until the input ends."""
    for name in LIBRARIES:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            failed = _first_failure(Path(folder), **request)
        answers.write(json.dumps({"failed": failed}) + "\n")
        answers.flush()


def _first_failure(folder: Path, options: list[str], tests: list[str], seconds: float) -> str | None:
    code = _run_forked(folder, options, tests, seconds)
    if code in MISSING_TESTS:
        files = {test.partition("::")[0]: None for test in tests}
        code = _run_forked(folder, options, list(files), seconds)
    noted = folder / "failed"
    if noted.exists():
        return noted.read_text()
    return None if code in (0, *MISSING_TESTS) else "time" if code is None else f"exit code {code}"


def _run_forked(folder: Path, options: list[str], tests: list[str], seconds: float) -> int | None:
    """Return the exit code of a run in a fork; None if it takes longer than `seconds`."""
    process = os.fork()
    if not process:
        _run(folder, options, tests)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _run(folder: Path, options: list[str], tests: list[str]) -> None:
    """Run tests in this process, and end it."""
    code: Any = 3
    try:
        os.setsid()
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        listed = folder / "chosen.tests"  # too many for a command line
        listed.write_text("\n".join(tests))
        code = pytest.main([*options, f"@{listed}"], plugins=[FirstFailure(folder / "failed")])
    finally:
        sys.stdout.flush()
        os._exit(int(code))


if __name__ == "__main__":
    main()
