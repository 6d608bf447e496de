"""Mutants of the product, made by cosmic-ray, and a table of what became of them."""

import argparse
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tests.mutants.choose import PRISTINE
from tests.mutants.lanes import NOT_COPIED, Lane
from tests.mutants.sample import TESTS, Chunk, chunks, sample
from tests.mutants.table import KILLED, Mutant, killed, mutants, table

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "mutants"


def main() -> int:
    """Sample, run, and tell; 1 where the tests kill too few."""
    asked = _arguments()
    if not asked.resume:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    for tree in (PRISTINE, *(f"tree-{number}" for number in range(asked.jobs))):
        shutil.rmtree(WORK / tree, ignore_errors=True)  # in which a run that was stopped leaves a mutant
    packages = asked.packages or list(TESTS)
    drawn = sample(ROOT, WORK, packages, asked.count, asked.seed)
    work = chunks(drawn, WORK)
    err = Console(stderr=True)
    found: list[Mutant] = []
    with Progress(console=err) as progress, ThreadPoolExecutor(asked.jobs) as pool:
        task = progress.add_task("mutants", total=len(drawn))
        shutil.copytree(ROOT / "qload", WORK / PRISTINE / "qload", ignore=NOT_COPIED)
        lanes = [Lane(ROOT, WORK / f"tree-{number}") for number in range(asked.jobs)]

        def check(package: str) -> None:
            lane = lanes.pop()
            lane.baseline(package)
            lanes.append(lane)

        list(pool.map(check, packages))

        def run(chunk: Chunk) -> None:
            lane = lanes.pop()
            try:
                lane.run(chunk)
            finally:
                lanes.append(lane)
            progress.advance(task, len(chunk.items))
            found.extend(mutants([chunk]))
            if not err.is_terminal:  # where the bar is drawn once, at the end
                alive = sum(one.survived for one in found)
                err.print(f"{len(found)} of {len(drawn)} mutants, {alive} survived", highlight=False)

        list(pool.map(run, work))
    found.sort(key=lambda one: (packages.index(one.package), one.module, one.line))
    table(found, Console(width=140))
    return 0 if killed(found) >= KILLED else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s mutants --", description=__doc__)
    parser.add_argument("--count", type=int, default=400, help="how many mutants are drawn (400)")
    parser.add_argument("--seed", type=int, default=1, help="which ones: the same seed draws the same (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many run side by side")
    parser.add_argument(
        "--resume", action="store_true", help="go on where the same command was stopped, on the same code"
    )
    parser.add_argument("packages", nargs="*", metavar="package", help="of these packages alone")
    asked = parser.parse_args()
    if unknown := set(asked.packages) - set(TESTS):
        parser.error(f"no package {', '.join(sorted(unknown))}: there are {', '.join(TESTS)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
