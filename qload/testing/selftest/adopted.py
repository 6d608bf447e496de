"""The kill matrix of tests that exist already: which planted faults do they let through?"""

import logging
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qload.errors import ArgumentError
from qload.testing.kernel_faults import KERNEL_FAULTS, KernelFault

log: logging.Logger = logging.getLogger("qload")

PLUGIN = "qload.testing.selftest.planting"
PASSED, FAILED = 0, 1  # exit codes of pytest


@dataclass(frozen=True)
class Outcome:
    """A fault, and what the tests made of it.

    Attributes
    ----------
    fault, words
        Which one.
    end
        "caught" by a test that failed; "let through"; "not reached", where no test ran the function with a
        weight that the fault changes.
    """

    fault: str
    words: str
    end: Literal["caught", "let through", "not reached"]


def adopted_matrix(
    tests: str, *, pack: str | None = None, gemm: str | None = None, format: str | None = None
) -> Iterator[Outcome]:
    """Run somebody's tests once for each fault that is planted in their own functions.

    Parameters
    ----------
    tests
        The command, "pytest tests/kernels"; it runs in the working directory.
    pack, gemm
        `module:function` of what packs a weight, and of what multiplies x (M, K) by it; at least one.
    format
        Which format of qload the tensors of `pack` are, by the names of its parameters.

    Raises
    ------
    ArgumentError
        Where the command is no pytest, or its tests fail before anything is planted.
    """
    if pack is None and gemm is None:
        raise ArgumentError("pack or gemm", "module:function", "neither")
    command = _command(tests)
    with tempfile.TemporaryDirectory(prefix="qload-selftest-") as folder:
        reached = Path(folder) / "reached"
        _run(command, [], (PASSED,))
        for fault in KERNEL_FAULTS:
            if (fault.change if pack else None) or (fault.around if gemm else None):
                reached.unlink(missing_ok=True)
                yield _outcome(command, fault, reached, pack, gemm, format)


def _command(tests: str) -> list[str]:
    words = shlex.split(tests)
    if not words or Path(words[0]).name not in ("pytest", "py.test"):
        raise ArgumentError("tests", "a command of pytest, such as 'pytest tests/kernels'", repr(tests))
    return [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", PLUGIN, *words[1:]]


def _outcome(
    command: list[str],
    fault: KernelFault,
    reached: Path,
    pack: str | None,
    gemm: str | None,
    format: str | None,
) -> Outcome:
    given = {"fault": fault.name, "reached": str(reached), "pack": pack, "gemm": gemm, "format": format}
    options = [f"--qload-plant-{name}={value}" for name, value in given.items() if value is not None]
    code = _run(command, options, (PASSED, FAILED))
    end: Literal["caught", "let through", "not reached"] = "caught" if code == FAILED else "let through"
    log.info("%s: %s", fault.name, end)
    return Outcome(fault.name, fault.words, end if reached.exists() else "not reached")


def _run(command: list[str], options: list[str], allowed: tuple[int, ...]) -> int:
    own = str(Path(__file__).resolve().parents[3])  # where qload is, also if the working directory is another
    paths = os.pathsep.join(filter(None, [os.getcwd(), own, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in allowed:
        tail = f"{done.stdout[-1000:]}{done.stderr[-1000:]}"
        what = "tests that pass" if allowed == (PASSED,) else "tests that pass or fail"
        raise ArgumentError("tests", what, f"exit code {done.returncode}\n{tail}")
    return done.returncode
