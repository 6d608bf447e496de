"""Run known faults one at a time, and collect the checks or tests that notice each of them.

A fault is a change of a kernel's weight or product (`qload.testing.kernel_faults`), or of one place in the
source of a project. Its checks run in this process, or as pytest in a process of its own.
"""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from qload.errors import ArgumentError

log: logging.Logger = logging.getLogger("qload")

PASSED, FAILED, INTERRUPTED = 0, 1, 2  # exit codes of pytest
TAIL_CHARACTERS = 4000  # of the output of a run that broke down
FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)  # lines of `pytest -rfE`


class FaultResult(Protocol):
    """The outcome of one fault: a row of the report of `qload selftest` and of `nox -s faults`."""

    @property
    def fault(self) -> str:
        """The id of the fault."""

    @property
    def end(self) -> str:
        """ "caught", "let through", or the reason for neither."""

    def row(self) -> dict[str, Any]:
        """The columns of the report by name: `fault`, `words`, `end`, and a column for each check."""


Fault = TypeVar("Fault")
Result = TypeVar("Result", bound=FaultResult)


def run_faults(
    faults: Iterable[Fault], trial: Callable[[Fault], Iterable[Result]], jobs: int = 1
) -> Iterator[Result]:
    """Try each of `faults` by `trial`, and yield the results in the order of the faults.

    `trial`: fault -> its results, none for a fault that does not apply. `jobs`: threads; with one, a fault is
    tried when its result is asked for.
    """
    if jobs == 1:
        yield from _logged(map(trial, faults))
        return
    with ThreadPoolExecutor(jobs) as pool:
        yield from _logged(pool.map(trial, faults))


def _logged(tried: Iterable[Iterable[Result]]) -> Iterator[Result]:
    for results in tried:
        for result in results:
            log.info("%s: %s", result.fault, result.end)
            yield result


@dataclass(frozen=True)
class PytestRun:
    """A finished run of pytest.

    Attributes
    ----------
    exit_code
        Of the process; None after a timeout.
    output
        Standard output and standard error.
    """

    exit_code: int | None
    output: str

    @property
    def failed(self) -> list[str]:
        """The node ids of failed tests and of errors, if pytest ran with `-rfE`."""
        return FAILED_TEST.findall(self.output)

    def check(self, allowed: tuple[int, ...], expected: str) -> "PytestRun":
        """Return the run, or raise ArgumentError unless the exit code is an `allowed` one.

        `expected`: text of the error.
        """
        if self.exit_code not in allowed:
            got = f"exit code {self.exit_code}\n{self.output[-TAIL_CHARACTERS:]}"
            raise ArgumentError("tests", expected, got)
        return self


def run_pytest(
    *arguments: str,
    path: Iterable[str | Path] = (),
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> PytestRun:
    """Run pytest with `arguments` in a process of its own.

    Parameters
    ----------
    arguments
        Of pytest.
    path
        Folders that come first on the import path.
    folder
        The working directory; None: that of this process.
    environment
        More environment variables.
    timeout
        Seconds until the process is killed; None: no limit.
    """
    paths = os.pathsep.join(filter(None, [*map(str, path), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
    command = [sys.executable, "-m", "pytest", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return PytestRun(None, f"killed after {timeout} s")
    return PytestRun(done.returncode, done.stdout + done.stderr)
