"""Breaks qload on purpose, one seeded fault at a time, and prints which tests notice: the kill matrix.

    python -m qload.testing.faults                 every fault
    python -m qload.testing.faults zero-plus-one   one of them

A fault is a patch of one place: it is applied to a copy of the project, the tests run there, and a fault
that fewer than two tests notice fails the run. No test knows the faults.
"""

import argparse
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qload.errors import ArgumentError
from qload.testing.faults.fault import Fault
from qload.testing.faults.tables import FAULTS

log: logging.Logger = logging.getLogger("qload")

ROOT = Path(__file__).resolve().parents[3]
COPIED = ("qload", "tests", "fixtures", "golden", "docs", ".ci", "README.md", "pyproject.toml", "noxfile.py")
LEAST_KILLS = 2
ENOUGH = 10  # failures after which a fault is known well enough
CORES_OF_A_RUN = 2
# Not tests/meta, which knows every fault by its name.
TESTS = [
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-n",
    str(CORES_OF_A_RUN),
    "--tb=no",
    "-rfE",
    "--ignore=tests/meta",
    "--hypothesis-profile=faults",
    "-m",
    "not gpu",
]
RAN = (0, 1, 2)  # all passed, some failed, stopped after enough failures
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def kills(fault: Fault, known: Sequence[str] = ()) -> list[str]:
    """The tests that fail with this fault, of a copy of the project; `known` ones fail without it too."""
    left_out = (f"--deselect={test}" for test in known)
    failed = _failures(fault.apply, f"--maxfail={ENOUGH}", *left_out, *fault.tests)
    log.info("%s: killed by %d tests", fault.name, len(failed))
    return failed


def already_failing() -> list[str]:
    """The tests that fail on this machine with no fault at all: they can tell nothing."""
    return _failures(lambda root: None)


def _failures(change: Callable[[Path], object], *options: str) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="qload-fault-") as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.is_file():
                shutil.copyfile(source, root / name)
        change(root)
        paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *TESTS, *options]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        failed = FAILED.findall(done.stdout)
        if done.returncode not in RAN and len(failed) < ENOUGH:  # enough of them end a run in several ways
            tail = done.stdout[-2000:] + done.stderr[-2000:]
            raise ArgumentError("the tests", "a run of pytest", f"exit code {done.returncode}\n{tail}")
        return failed


def main(arguments: list[str]) -> int:
    """Run the faults named (all, if none is), print the matrix; 1 where one goes unnoticed."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    known = {fault.name: fault for fault in FAULTS}
    parser = argparse.ArgumentParser(
        prog="python -m qload.testing.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"faults: {', '.join(known)}",
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="names of faults; default: all")
    arguments = parser.parse_args(arguments).faults
    unknown = set(arguments) - set(known)
    if unknown:
        raise ArgumentError("fault", f"one of {', '.join(known)}", ", ".join(sorted(unknown)))
    table = Table(title="kill matrix")
    for heading in ("fault", "file", "tests killed", "such as"):
        table.add_column(heading, overflow="fold")
    unnoticed, failing = 0, already_failing()
    for test in failing:
        log.warning("left out, as it fails without a fault: %s", test)
    chosen = [known[name] for name in arguments or known]
    for fault in [each for each in chosen if each.package and importlib.util.find_spec(each.package) is None]:
        log.warning("left out, as %s is not installed: %s", fault.package, fault.name)
        chosen.remove(fault)
    at_once = max(1, (os.cpu_count() or 1) // CORES_OF_A_RUN)
    with ThreadPoolExecutor(at_once) as pool:
        runs = pool.map(lambda fault: kills(fault, failing), chosen)
        matrix = list(track(zip(chosen, runs, strict=True), total=len(chosen), console=Console(stderr=True)))
    for fault, killed in matrix:
        unnoticed += len(killed) < LEAST_KILLS
        count = f"{len(killed)}{'+' * (len(killed) >= ENOUGH)}"
        table.add_row(fault.name, fault.file, count, "\n".join(killed[:2]))
    Console().print(table)
    return 1 if unnoticed else 0
