"""Change one operator, number or condition of qload at a time, and count the mutants that its tests kill."""

import argparse
import json
import os
import shutil
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from threading import Lock
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from qload.cli.testing import report_faults
from qload.testing.selftest.runner import run_faults
from tests.faults.project_copy import Pool
from tests.mutants.covering_tests import TestCoverage, TestServer
from tests.mutants.sample import PACKAGES, Mutant, sample
from tests.paths import ROOT

WORK = ROOT / "build" / "mutants"
RESULTS = WORK / "results.jsonl"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
MIN_KILLED = 0.9  # share of the mutants that are not equivalent


@dataclass(frozen=True)
class MutantResult:
    """A mutant, and whether a test killed it; `reason`: why no test can, if one is listed."""

    mutant: Mutant
    killed: bool
    reason: str | None

    @property
    def fault(self) -> str:
        """The place of the change."""
        return self.mutant.fault.name

    @property
    def end(self) -> str:
        """ "caught", "equivalent" or "let through"."""
        return "caught" if self.killed else "equivalent" if self.reason else "let through"

    def row(self) -> dict[str, Any]:
        """With the line before and after, and the reason."""
        before, after = self.mutant.change()
        change = f"- {before}\n+ {after}"
        words = {"fault": self.fault, "words": change, "end": self.end}
        return {**words, "change": change, "reason": self.reason}


def equivalent_reason(mutant: Mutant) -> str | None:
    """The listed reason why no test can tell the mutant from the original, or None."""
    before, after = mutant.change()
    for known in tomllib.loads(EQUIVALENT.read_text())["mutant"]:
        place = known.get("module", mutant.module)  # or any module
        if (place, known["old"], known["new"]) == (mutant.module, before, after):
            return str(known["reason"])
    return None


class MutantProgress:
    """A bar on a terminal, or a line for each result elsewhere."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total = progress, total
        self.task = progress.add_task("mutants", total=total)
        self.done = self.survived = 0
        self.lock = Lock()

    def add(self, killed: bool) -> None:
        """Count a result."""
        with self.lock:
            self.done += 1
            self.survived += not killed
            self.progress.advance(self.task)
            console = self.progress.console
            if not console.is_terminal:  # there the bar is drawn once, at the end
                console.print(
                    f"{self.done} of {self.total} mutants, {self.survived} survived", highlight=False
                )


def main() -> int:
    """Sample, run and report; 1 if the tests kill too few."""
    options = _arguments()
    if not options.resume:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(WORK / "copies", ignore_errors=True)  # a stopped run leaves a mutant in one
    drawn = sample(options.packages or PACKAGES, options.count, options.seed)
    known = _finished()
    coverage = TestCoverage.measure(WORK / "coverage")
    with Progress(console=Console(stderr=True)) as progress, ExitStack() as servers:
        copies = [coverage.copy(WORK / f"copies/{number}") for number in range(options.jobs)]
        pool = Pool(servers.enter_context(TestServer(copy)) for copy in copies)
        counted = MutantProgress(progress, len(drawn))
        trial = partial(_try, coverage=coverage, pool=pool, known=known, counted=counted)
        results = list(run_faults(drawn, trial, options.jobs))
        results = _try_whole_suite(results, coverage, pool, options.jobs)
    results.sort(key=lambda one: (one.mutant.module, one.mutant.line))
    Console(width=140).print(package_table(results))
    survivors = [result.row() for result in results if not result.killed]
    if survivors:
        report_faults(survivors, as_json=False)
    return 0 if killed_share(results) >= MIN_KILLED else 1


def _try(
    mutant: Mutant,
    coverage: TestCoverage,
    pool: Pool[TestServer],
    known: dict[str, bool],
    counted: MutantProgress,
) -> Iterator[MutantResult]:
    killed = known.get(mutant.key)
    if killed is None:
        with pool.take() as server:
            killed = any(server.kills(mutant, tests) for tests in coverage.turns(mutant))
        with counted.lock, RESULTS.open("a") as file:
            file.write(json.dumps({"mutant": mutant.key, "killed": killed}) + "\n")
    counted.add(killed)
    yield MutantResult(mutant, killed, equivalent_reason(mutant))


def _try_whole_suite(
    results: Sequence[MutantResult], coverage: TestCoverage, pool: Pool[TestServer], jobs: int
) -> list[MutantResult]:
    """Run all tests on the survivors of different modules at once; a failed test then runs on each alone."""
    killed: set[str] = set()
    for mutants in _rounds([result.mutant for result in results if result.end == "let through"]):
        copy = coverage.copy(WORK / "copies/together")
        with ExitStack() as planted:
            for mutant in mutants:
                planted.enter_context(copy.with_fault(mutant.fault))
            failed = copy.pytest("-rfE", "-n", str(jobs), "-m", "not gpu and not slow").failed
        shutil.rmtree(copy.folder)
        with pool.take() as server:
            killed |= {mutant.key for mutant in mutants if failed and server.kills(mutant, failed)}
    with RESULTS.open("a") as file:
        file.writelines(json.dumps({"mutant": key, "killed": True}) + "\n" for key in sorted(killed))
    return [replace(result, killed=result.killed or result.mutant.key in killed) for result in results]


def _rounds(mutants: Sequence[Mutant]) -> list[list[Mutant]]:
    """Distribute mutants to rounds, each with one mutant of a module at most."""
    by_module: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_module[mutant.module].append(mutant)
    return [[one for one in each if one] for each in zip_longest(*by_module.values())]


def _finished() -> dict[str, bool]:
    """Results of a run that was stopped, by the key of the mutant."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["mutant"]: row["killed"] for row in map(json.loads, lines)}


def package_table(results: Sequence[MutantResult]) -> Table:
    """A row for each package, and one for all."""
    shown = Table("package", "mutants", "killed", "equivalent", "survived", "killed of the others")
    for package in [*dict.fromkeys(one.mutant.package for one in results), None]:
        own = [one for one in results if package in (None, one.mutant.package)]
        counts = [sum(one.end == end for one in own) for end in ("caught", "equivalent", "let through")]
        share = f"{killed_share(own):.1%}"
        shown.add_row(package or "all", str(len(own)), *map(str, counts), share, end_section=package is None)
    return shown


def killed_share(results: Sequence[MutantResult]) -> float:
    """The share of killed mutants among those that are not equivalent."""
    others = [one for one in results if one.end != "equivalent"]
    return sum(one.killed for one in others) / max(1, len(others))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s mutants --", description=__doc__)
    parser.add_argument("--count", type=int, default=400, help="number of mutants (400)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--resume", action="store_true", help="continue a stopped run on the same source")
    parser.add_argument("packages", nargs="*", metavar="package", help="packages to change; default: all")
    options = parser.parse_args()
    if unknown := set(options.packages) - set(PACKAGES):
        parser.error(f"no package {', '.join(sorted(unknown))}: there are {', '.join(PACKAGES)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
