"""The runner of faults: results in order, lazily or in threads, and pytest in a process of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest

from qload.errors import ArgumentError
from qload.testing.selftest.runner import FAILED, PASSED, run_faults, run_pytest

TESTS = """
import os, helper, pytest

def test_passes():
    assert os.environ["LETTER"] == "a"

@pytest.mark.parametrize("number", [2, 1], ids=["the wrong one", "the right one"])
def test_one_fails(number):
    assert helper.NUMBER == number
"""


@dataclass(frozen=True)
class Result:
    fault: str
    end: str = "caught"

    def row(self) -> dict[str, Any]:
        return {"fault": self.fault, "words": "", "end": self.end}


def twice(fault: str) -> Iterator[Result]:
    """Two results of each fault, and none of "b"."""
    if fault != "b":
        yield from (Result(fault), Result(fault.upper(), "let through"))


@pytest.mark.parametrize("jobs", [1, 3])
def test_results_come_in_the_order_of_the_faults(jobs: int) -> None:
    assert [each.fault for each in run_faults("abc", twice, jobs)] == ["a", "A", "c", "C"]


def test_one_job_tries_a_fault_when_its_result_is_asked_for() -> None:
    tried: list[tuple[str, bool]] = []

    def trial(fault: str) -> list[Result]:
        tried.append((fault, current_thread() is main_thread()))
        return [Result(fault)]

    results = run_faults("abc", trial)

    assert (next(results).fault, tried) == ("a", [("a", True)])
    assert len([*run_faults("de", trial, 2)]) == 2
    assert sorted(tried[1:]) == [("d", False), ("e", False)]


def test_each_result_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "qload"):
        assert len([*run_faults("a", twice)]) == 2

    assert [record.getMessage() for record in caplog.records] == ["a: caught", "A: let through"]


def test_pytest_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "test_it.py").write_text(TESTS)
    (tmp_path / "helper.py").write_text("NUMBER = 1\n")

    run = run_pytest("-q", "-rfE", path=[tmp_path], folder=tmp_path / "project", environment={"LETTER": "a"})

    assert (run.exit_code, run.failed) == (FAILED, ["test_it.py::test_one_fails[the wrong one]"])
    assert run.check((PASSED, FAILED), "any") is run
    with pytest.raises(ArgumentError, match=r"^tests\n  expected tests that pass\n  got      exit code 1\n"):
        run.check((PASSED,), "tests that pass")


def test_a_run_that_takes_too_long_has_no_exit_code(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import time\n\ndef test_it():\n    time.sleep(60)\n")

    run = run_pytest("-q", folder=tmp_path, timeout=0.1)

    assert run.exit_code is None
    with pytest.raises(ArgumentError, match=r"killed after 0\.1 s"):
        run.check((PASSED,), "tests that pass")
