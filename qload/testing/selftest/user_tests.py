"""The kill matrix of the tests of another project: the planted faults that they catch or let through."""

import os
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qload.errors import ArgumentError
from qload.testing.kernel_faults import KERNEL_FAULTS, KernelFault
from qload.testing.selftest.runner import FAILED, PASSED, run_faults, run_pytest

PLUGIN = "qload.testing.selftest.fault_injection"

End = Literal["caught", "let through", "not reached"]


@dataclass(frozen=True)
class Outcome:
    """The result of the tests with one fault.

    Attributes
    ----------
    fault, words
        The id and the description of the fault.
    end
        "caught" by a test that failed; "let through"; "not reached", if no test called the function with a
        weight that the fault changes.
    """

    fault: str
    words: str
    end: End

    def row(self) -> dict[str, Any]:
        """The columns of the report by name."""
        return {"fault": self.fault, "words": self.words, "end": self.end}


def adopted_matrix(
    tests: str, *, pack: str | None = None, gemm: str | None = None, format: str | None = None
) -> Iterator[Outcome]:
    """Run the tests of a project once for each fault, planted in its own functions.

    Parameters
    ----------
    tests
        The command, "pytest tests/kernels"; it runs in the working directory.
    pack, gemm
        `module:function` of the packing of a weight, and of the product of x (M, K) by it; at least one.
    format
        The format of the tensors of `pack`, named as in qload, if its parameters are tensors under stored
        names.

    Raises
    ------
    ArgumentError
        If the command is not pytest, or the tests fail before a fault is planted.
    """
    if pack is None and gemm is None:
        raise ArgumentError("pack or gemm", "module:function", "neither")
    options = _pytest_options(tests)
    applicable = [
        fault
        for fault in KERNEL_FAULTS
        if (fault.change if pack else None) or (fault.around if gemm else None)
    ]
    _run(options, (PASSED,))
    with tempfile.TemporaryDirectory(prefix="qload-selftest-") as folder:
        reached = Path(folder) / "reached"

        def trial(fault: KernelFault) -> Iterator[Outcome]:
            reached.unlink(missing_ok=True)
            values = {"fault": fault.name, "reached": reached, "pack": pack, "gemm": gemm, "format": format}
            planted = [f"--qload-plant-{name}={value}" for name, value in values.items() if value is not None]
            code = _run([*options, *planted], (PASSED, FAILED))
            end: End = "caught" if code == FAILED else "let through"
            yield Outcome(fault.name, fault.words, end if reached.exists() else "not reached")

        yield from run_faults(applicable, trial)


def _pytest_options(tests: str) -> list[str]:
    words = shlex.split(tests)
    if not words or Path(words[0]).name not in ("pytest", "py.test"):
        raise ArgumentError("tests", "a command of pytest, such as 'pytest tests/kernels'", repr(tests))
    return ["-q", "-x", "--tb=no", "-p", PLUGIN, *words[1:]]


def _run(options: list[str], allowed: tuple[int, ...]) -> int | None:
    qload_folder = Path(__file__).resolve().parents[3]
    expected = "tests that pass" if allowed == (PASSED,) else "tests that pass or fail"
    return run_pytest(*options, path=[os.getcwd(), qload_folder]).check(allowed, expected).exit_code
