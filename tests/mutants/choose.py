"""The tests of one mutant: first those that ran the changed lines while nothing was changed.

Run in a tree with one mutant: exits with what pytest says. A changed line that runs when its module is
imported may matter to any test, and so does one that no test was seen to run: then all tests of the package
follow.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

from coverage import CoverageData

from tests.mutants.sample import TESTS, modules

PYTEST = (
    *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
    *("-m", "not gpu", "--hypothesis-profile=faults"),
)
PRISTINE = "pristine"  # the folder beside the trees that holds the code as it is
TOLD_NOTHING = (4, 5)  # pytest's codes where a named test is not there, as a mutant may change its name
MANY = 300  # names of tests; of more than these whole files are run


def main() -> int:
    """The first run that fails tells; 0 where all pass."""
    (package,) = sys.argv[1:]
    work = Path.cwd().parent
    seen = contexts(package, work)
    chosen = sorted({context.rpartition("|")[0] for context in seen - {""}})
    if any(not context.endswith("|run") for context in seen) or len(chosen) > MANY:
        chosen = sorted({name.partition("::")[0] for name in chosen})
    if chosen:
        code = _pytest(sorted(chosen, key=lambda name: _place(package, name)), work / f"{os.getpid()}.tests")
        if code and code not in TOLD_NOTHING:
            return code
        if code == 0 and "" not in seen:
            return 0
    return subprocess.run([*PYTEST, *TESTS[package]]).returncode


def measure(package: str, tree: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the package's tests in an unchanged tree, and note which lines of it each of them runs."""
    measured = [f"--cov=qload.{package}", "--cov-context=test", "--cov-report="]
    noted = {"COVERAGE_FILE": str(coverage_file(package, tree)), "COVERAGE_CORE": "ctrace"}
    command = [*PYTEST, *measured, *TESTS[package]]
    return subprocess.run(command, cwd=tree, env=environment | noted, capture_output=True, text=True)


def coverage_file(package: str, tree: Path) -> Path:
    """What `measure` writes, beside the trees."""
    return tree.parent / f"{package}.coverage"


def contexts(package: str, work: Path) -> set[str]:
    """The tests that ran what is changed, as `file::test|run`; "" of an import."""
    data = CoverageData(str(coverage_file(package, work / PRISTINE)))
    data.read()
    found: set[str] = set()
    for module, line in _changed(package, work / PRISTINE):
        first, last = _statement((work / PRISTINE / module).read_text(), line)
        for file in data.measured_files():
            if Path(file).match(f"*/{module}"):
                noted = data.contexts_by_lineno(file)
                found.update(name for at in range(first, last + 1) for name in noted.get(at, ()))
    return found


def _changed(package: str, pristine: Path) -> Iterator[tuple[str, int]]:
    """Module and number of each line that is not what it was."""
    for place in modules(package):
        files = [Path(place)] if place.endswith(".py") else sorted(Path(place).rglob("*.py"))
        for file in files:
            old, new = (path.read_text().splitlines() for path in (pristine / file, file))
            if old != new:
                for tag, start, stop, _, _ in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
                    if tag != "equal":
                        yield from ((str(file), line) for line in range(start + 1, max(stop, start + 1) + 1))


def _statement(text: str, line: int) -> tuple[int, int]:
    """First and last line of the smallest statement that holds a line; of a blank one, the line."""
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return min(spans, key=lambda span: span[1] - span[0], default=(line, line))


def _place(package: str, test: str) -> int:
    """Where the package's list of tests has the file of one."""
    return next((at for at, path in enumerate(TESTS[package]) if test.startswith(path)), len(TESTS[package]))


def _pytest(chosen: list[str], listed: Path) -> int:
    """pytest of these names, which may be too many for a command line."""
    listed.write_text("\n".join(chosen))
    try:
        return subprocess.run([*PYTEST, f"@{listed}"]).returncode
    finally:
        listed.unlink()


if __name__ == "__main__":
    sys.exit(main())
