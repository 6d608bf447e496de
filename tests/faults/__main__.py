"""Break qload in one place at a time, and print the tests that notice each seeded fault.

    python -m tests.faults                 every fault
    python -m tests.faults zero-plus-one   one of them
    python -m tests.faults mlx-biases-subtracted --tests tests/formats/test_mlx.py

A fault is a patch of one place: it is applied to a copy of the project, the tests run there, and a fault
that fewer than two tests notice fails the run. No test knows the faults.
"""

import argparse
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qload.cli.testing import report_faults
from qload.errors import ArgumentError
from qload.testing.selftest.runner import FAILED, INTERRUPTED, PASSED, run_faults
from tests.faults.fault import Fault
from tests.faults.project_copy import Pool, ProjectCopy
from tests.faults.tables import FAULTS

log: logging.Logger = logging.getLogger("qload")

MIN_FAILED_TESTS = 2
MAX_FAILED_TESTS = 10  # after which a run stops
CORES_PER_RUN = 2
# Without tests/meta, which compares every fault with the source.
RUN = ("--tb=no", "-rfE", "--ignore=tests/meta")


@dataclass(frozen=True)
class SeededResult:
    """A seeded fault, its change as text, its file, and the tests that fail with it."""

    fault: str
    words: str
    file: str
    failed: tuple[str, ...]

    @property
    def end(self) -> str:
        """ "caught" if enough tests fail."""
        return "caught" if len(self.failed) >= MIN_FAILED_TESTS else "let through"

    def row(self) -> dict[str, Any]:
        """With the number of failed tests, and the names of some."""
        count = f"{len(self.failed)}{'+' * (len(self.failed) >= MAX_FAILED_TESTS)}"
        shown = {"fault": self.fault, "words": self.words, "end": self.end, "file": self.file}
        return {**shown, "failed tests": count, "such as": "\n".join(self.failed[:2])}


def run_options(tests: Sequence[str]) -> tuple[str, ...]:
    """Return the options of pytest: all tests in several processes, or the given ones in one."""
    return (*RUN, *(tests or ("-n", str(CORES_PER_RUN))))


def try_fault(
    fault: Fault, pool: Pool[ProjectCopy], tests: Sequence[str] = (), known: Sequence[str] = ()
) -> Iterator[SeededResult]:
    """Run the tests on a copy with the fault; `known` tests fail without it too and are left out."""
    left_out = (f"--deselect={test}" for test in known)
    options = run_options(tests or fault.tests)
    with pool.take() as copy, copy.with_fault(fault):
        run = copy.pytest(*options, f"--maxfail={MAX_FAILED_TESTS}", *left_out)
    if len(run.failed) < MAX_FAILED_TESTS:  # a run that stops early has one of several exit codes
        run.check((PASSED, FAILED, INTERRUPTED), "a run of pytest")
    words = f"{fault.before.strip()} -> {fault.after.strip()}"
    yield SeededResult(fault.name, words, fault.file, tuple(run.failed))


def failing_tests(pool: Pool[ProjectCopy], tests: Sequence[str]) -> list[str]:
    """The tests that fail on this machine without any fault."""
    with pool.take() as copy:
        return copy.pytest(*run_options(tests)).check((PASSED, FAILED, INTERRUPTED), "a run of pytest").failed


def main(arguments: list[str]) -> int:
    """Run the named faults, or all, and print the report; 1 if one is let through."""
    known = {fault.name: fault for fault in FAULTS}
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"faults: {', '.join(known)}",
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="names of faults; default: all")
    parser.add_argument("--tests", nargs="+", default=(), metavar="PATH", help="tests to run; default: all")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    unknown = set(options.faults) - set(known)
    if unknown:
        raise ArgumentError("fault", f"one of {', '.join(known)}", ", ".join(sorted(unknown)))
    chosen = []
    for fault in (known[name] for name in options.faults or known):
        if fault.package and importlib.util.find_spec(fault.package) is None:
            log.warning("left out, as %s is not installed: %s", fault.package, fault.name)
        else:
            chosen.append(fault)
    jobs = max(1, (os.cpu_count() or 1) // CORES_PER_RUN)
    with tempfile.TemporaryDirectory(prefix="qload-faults-") as folder:
        numbers = range(min(jobs, max(1, len(chosen))))
        pool = Pool(ProjectCopy.create(Path(folder) / f"copy-{number}") for number in numbers)
        failing = failing_tests(pool, options.tests)
        for test in failing:
            log.warning("left out, as it fails without a fault: %s", test)
        results = run_faults(chosen, lambda fault: try_fault(fault, pool, options.tests, failing), jobs)
        return report_faults([result.row() for result in results], options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
