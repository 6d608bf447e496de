"""Tests of one mutant: first those that run its changed lines in the unchanged project.

A line that runs when its module is imported may matter to any test, and so may a line that no test runs: then
all tests of the package follow.
"""

import ast
from pathlib import Path

from coverage import CoverageData

from qload.testing.selftest.runner import PASSED
from tests.faults.project_copy import ProjectCopy
from tests.mutants.sample import TESTS, Mutant

MISSING_TESTS = (4, 5)  # exit codes of pytest without a named test, as a mutant may change its name
MAX_NAMES = 300  # of tests; beyond it whole files are run
TIMEOUT = 300.0  # seconds of a run, after which the mutant counts as killed
OPTIONS = ("-x", "--tb=no")


def measure_coverage(package: str, copy: ProjectCopy, coverage: Path) -> None:
    """Run the tests of a package in an unchanged copy, and write the lines of each test to a file.

    ArgumentError if a test fails.
    """
    if coverage.exists():
        return
    measured = (f"--cov=qload.{package}", "--cov-context=test", "--cov-report=")
    variables = {"COVERAGE_FILE": str(coverage), "COVERAGE_CORE": "ctrace"}
    run = copy.pytest(*OPTIONS, *measured, *TESTS[package], environment=variables)
    if run.exit_code != PASSED:
        coverage.unlink(missing_ok=True)
    run.check((PASSED,), f"tests of {package} that pass")


def is_killed(mutant: Mutant, copy: ProjectCopy, coverage: Path) -> bool:
    """Whether a test of the package of `mutant` fails on a copy with it."""
    contexts = covering_contexts(mutant, coverage)
    chosen = sorted({context.rpartition("|")[0] for context in contexts - {""}})
    if any(not context.endswith("|run") for context in contexts) or len(chosen) > MAX_NAMES:
        chosen = sorted({name.partition("::")[0] for name in chosen})
    with copy.with_fault(mutant.fault):
        if chosen:
            listed = copy.folder / "chosen.tests"  # too many for a command line
            listed.write_text("\n".join(sorted(chosen, key=lambda name: _rank(mutant.package, name))))
            code = copy.pytest(*OPTIONS, f"@{listed}", timeout=TIMEOUT).exit_code
            if code and code not in MISSING_TESTS:
                return True
            if code is None:
                return True
            if code == PASSED and "" not in contexts:
                return False
        return copy.pytest(*OPTIONS, *TESTS[mutant.package], timeout=TIMEOUT).exit_code != PASSED


def covering_contexts(mutant: Mutant, coverage: Path) -> set[str]:
    """The tests that run the changed statements, as `file::test|run`; "" for an import."""
    data = CoverageData(str(coverage))
    data.read()
    measured = [file for file in data.measured_files() if Path(file).match(f"*/{mutant.module}")]
    found: set[str] = set()
    for line in mutant.changed_lines():
        first, last = _statement(mutant.source, line)
        for file in measured:
            contexts = data.contexts_by_lineno(file)
            found.update(name for at in range(first, last + 1) for name in contexts.get(at, ()))
    return found


def _statement(text: str, line: int) -> tuple[int, int]:
    """The first and last line of the smallest statement around a line; of a blank one, the line."""
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return min(spans, key=lambda span: span[1] - span[0], default=(line, line))


def _rank(package: str, test: str) -> int:
    """The place of the file of a test in the list of the package."""
    return next((at for at, path in enumerate(TESTS[package]) if test.startswith(path)), len(TESTS[package]))
