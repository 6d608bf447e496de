"""What became of the mutants: a row a package, and each survivor with its line."""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome
from rich.console import Console
from rich.table import Table

from tests.mutants.sample import Chunk

KILLED = 0.9  # of the mutants that are not equivalent, how many have to die
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True)
class Mutant:
    """One line of the product as it was and as it was made."""

    package: str
    module: str
    line: int
    old: str
    new: str
    survived: bool

    @property
    def reason(self) -> str | None:
        """Why no test can tell it from the original, where somebody has said so."""
        for known in tomllib.loads(EQUIVALENT.read_text())["mutant"]:
            if (known["module"], known["old"], known["new"]) == (self.module, self.old, self.new):
                return str(known["reason"])
        return None


def mutants(chunks: Sequence[Chunk]) -> Iterator[Mutant]:
    """All mutants that ran; RuntimeError where one did not."""
    for chunk in chunks:
        with use_db(str(chunk.session), WorkDB.Mode.open) as session:
            results, items = dict(session.results), list(session.work_items)
        for item in items:
            (mutation,), result = item.mutations, results[item.job_id]
            if result.worker_outcome is not WorkerOutcome.NORMAL or not result.diff:
                raise RuntimeError(f"{mutation} did not run: {result.output}")
            old, new = _changed(result.diff)
            module, line = str(mutation.module_path), mutation.start_pos[0]
            yield Mutant(chunk.package, module, line, old, new, not result.is_killed)


def table(found: Sequence[Mutant], console: Console) -> None:
    """A row a package, then the survivors."""
    shown = Table("package", "mutants", "killed", "equivalent", "survived", "killed of the others")
    packages = [*dict.fromkeys(one.package for one in found), None]
    for package in packages:
        own = [one for one in found if package in (None, one.package)]
        alive = [one for one in own if one.survived]
        same = [one for one in alive if one.reason]
        cells = (len(own), len(own) - len(alive), len(same), len(alive) - len(same))
        shown.add_row(package or "all", *map(str, cells), f"{killed(own):.1%}", end_section=package is None)
    console.print(shown)
    for one in found:
        if one.survived:
            where = f"{one.module}:{one.line}: {one.reason or 'SURVIVED'}"
            console.print(f"{where}\n  - {one.old}\n  + {one.new}", markup=False, highlight=False)


def killed(found: Sequence[Mutant]) -> float:
    """The share of those that are not equivalent."""
    others = [one for one in found if not (one.survived and one.reason)]
    return sum(not one.survived for one in others) / max(1, len(others))


def _changed(diff: str) -> tuple[str, str]:
    """The first line that a diff takes away, and the first that it brings, blank ones aside."""
    lines = [line for line in diff.splitlines() if line[1:].strip() and line[:3] not in ("---", "+++")]
    old = next((line[1:].strip() for line in lines if line.startswith("-")), "")
    new = next((line[1:].strip() for line in lines if line.startswith("+")), "")
    return old, new
