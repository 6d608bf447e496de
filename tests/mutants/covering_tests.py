"""Tests of one mutant: those of its changed lines in the unchanged project, the nearest and fastest first.

A line that runs at an import, or without a test, may matter to any: then all tests of its module follow.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self
from xml.etree import ElementTree

from coverage import CoverageData

from qload.testing.selftest.runner import PASSED
from tests.faults.project_copy import PYTEST_OPTIONS, ProjectCopy
from tests.mutants.changed_lines import runs_at_import, statements_around
from tests.mutants.sample import Mutant

OPTIONS = (*PYTEST_OPTIONS, "-x", "--tb=no", "-p", "no:xdist", "-p", "no:cov", "--snapshot-warn-unused")
IMPORTED = (
    "tests/meta/test_constants.py",
    "tests/meta/test_defaults.py",
    "tests/meta/test_argument_types.py",
    "tests/meta/test_dataclasses.py",
    "tests/meta/test_signatures.py",
    "tests/cli/test_command_line.py::test_help_has_examples_and_the_exit_codes",
)
SECONDS = 60.0  # of the chosen tests of a mutant, as measured
CASES = 4  # of one test function in the first turn
FIRST_SECONDS = 8.0  # of the tests of the first turn
TIMEOUT = 300.0  # seconds of a run, after which the mutant counts as killed


class TestServer:
    """A process for tests of a `copy` of the project, on its source at the time of a run."""

    __test__ = False  # no class of tests

    def __init__(self, copy: ProjectCopy) -> None:
        self.copy = copy
        variables = {**os.environ, "PYTHONPATH": str(copy.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = (sys.executable, "-m", "tests.mutants.forked_tests")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=copy.folder, env=variables, stdin=pipe, stdout=pipe, text=True
        )
        self._passing: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def kills(self, mutant: Mutant, tests: Sequence[str]) -> bool:
        """Whether one of `tests` fails on the mutant, and passes without it."""
        with self.copy.with_fault(mutant.fault):
            failed = self._first_failure(tests)
        if failed is None or failed in self._passing or "::" not in failed:
            return failed is not None
        if self._first_failure([failed]) is None:
            self._passing.add(failed)
            return True
        return self.kills(mutant, [test for test in tests if test != failed])

    def _first_failure(self, tests: Sequence[str]) -> str | None:
        """Run tests until one fails, and return its id, or the end of a broken run; None if all pass."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"options": OPTIONS, "tests": list(tests), "seconds": TIMEOUT}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        failed: str | None = json.loads(self._process.stdout.readline())["failed"]
        return failed


@dataclass
class TestCoverage:
    """The tests that run each line of qload, and their seconds, measured in a `folder`."""

    __test__ = False  # no class of tests

    folder: Path
    seconds: dict[str, float]

    @classmethod
    def measure(cls, folder: Path) -> Self:
        """Run the fast tests of an unchanged copy of the project, unless `folder` has their coverage already.

        ArgumentError if a test fails.
        """
        if not (folder / "tests.xml").exists():
            shutil.rmtree(folder, ignore_errors=True)
            measured = ("--cov=qload", "--cov-context=test", "--cov-report=")
            report = (f"--junitxml={folder / 'running.xml'}", "-o", "junit_duration_report=call")
            variables = {"COVERAGE_FILE": str(folder / "coverage"), "COVERAGE_CORE": "ctrace"}
            selection = ("-m", "not gpu and not slow", "-n", str(os.cpu_count() or 1))
            copy = ProjectCopy.create(folder / "copy")
            run = copy.pytest(*measured, *report, *selection, environment=variables)
            run.check((PASSED,), "tests that pass")
            (folder / "running.xml").rename(folder / "tests.xml")
        cases = ElementTree.parse(folder / "tests.xml").iter("testcase")
        names = {
            f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": case for case in cases
        }
        return cls(folder, {name: float(case.attrib["time"]) for name, case in names.items()})

    def copy(self, folder: Path) -> ProjectCopy:
        """Copy the measured project with its compiled modules."""
        return ProjectCopy(self.folder / "copy").clone(folder)

    def turns(self, mutant: Mutant) -> Iterator[list[str]]:
        """A few cases of each test function of the changed lines; then the others, of `SECONDS` in all."""
        places, lines = mutant.changed_lines(), _tests_by_line(self.folder / "coverage", mutant.module)
        changed = {test for line in statements_around(mutant.source, places) for test in lines.get(line, ())}
        imported = "" in changed or not changed or runs_at_import(mutant.source, places)
        tests = {test for each in lines.values() for test in each} if imported else changed
        near = f"tests/{mutant.package}/"
        ranked = sorted(
            tests - {""}, key=lambda test: (not test.startswith(near), self._duration(test), test)
        )
        left, first, others = SECONDS, [*IMPORTED] if imported else [], list[str]()
        cases: dict[str, int] = defaultdict(int)
        for test in ranked:
            left -= self._duration(test)
            if left < 0:
                break
            function = test.partition("[")[0]
            cases[function] += 1
            early = cases[function] <= CASES and left > SECONDS - FIRST_SECONDS
            (first if early else others).append(test)
        yield from filter(None, (first, others))

    def _duration(self, test: str) -> float:
        return self.seconds.get(test, 1.0)


@cache
def _tests_by_line(coverage: Path, module: str) -> dict[int, set[str]]:
    """The ids of the tests that run each line of a module; "" for an import."""
    data = CoverageData(str(coverage))
    data.read()
    [file] = [file for file in data.measured_files() if Path(file).match(f"*/{module}")] or [module]
    by_line = data.contexts_by_lineno(file)
    return {line: {context.rpartition("|")[0] for context in contexts} for line, contexts in by_line.items()}
