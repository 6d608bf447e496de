"""Mutants of qload: a seeded sample over the places of the source that cosmic-ray can change."""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec

from tests.faults.fault import Fault
from tests.paths import ROOT

ARGUMENTS = "tests/meta/test_argument_types.py"
RECORDS = "tests/meta/test_dataclasses.py"
# package of qload -> its tests, those first that kill most mutants in the least time.
TESTS = {
    "storage": ("tests/storage", ARGUMENTS, RECORDS),
    "detect": ("tests/detect", "tests/weights", "tests/architecture", "tests/checkpoint", ARGUMENTS, RECORDS),
    "verify": ("tests/verify", RECORDS),
    "weights": ("tests/weights", "tests/loader", "tests/parallel", ARGUMENTS, RECORDS),
    "loader": ("tests/loader", "tests/weights", "tests/quantize", ARGUMENTS, RECORDS),
    "spec": (
        "tests/spec",
        "tests/loader",
        "tests/formats/test_headers.py",
        "tests/formats/test_declarations.py",
        "tests/formats/test_gptq.py",
        "tests/formats/test_ct_pack.py",
        "tests/formats/test_fp8.py",
        "tests/quantize",
        ARGUMENTS,
        RECORDS,
    ),
    "formats": (
        "tests/formats/test_declarations.py",
        "tests/formats/test_headers.py",
        "tests/formats",
        "tests/spec/test_borders.py",
        "tests/contract/test_stored.py",
        "tests/loader",
        "tests/quantize",
        ARGUMENTS,
        RECORDS,
    ),
    "checkpoint": ("tests/checkpoint", "tests/architecture", ARGUMENTS, RECORDS),
    "architecture": ("tests/architecture", "tests/checkpoint", "tests/weights/test_heads.py", RECORDS),
}
# Modules that state the memory that native code may read, in packages that have other tests.
MODULES = {"devices": ("operands.py",)}
TESTS |= {"devices": ("tests/spec/test_borders.py", RECORDS)}
# Unions are nearly always annotations; a mutant of one cannot even be imported, and so shows nothing.
EXCLUDED_OPERATORS = "core/ReplaceBinaryOperator_BitOr_"


@dataclass(frozen=True)
class Mutant:
    """One place of a module of qload, changed by an operator of cosmic-ray."""

    package: str
    module: str
    line: int
    operator: str
    source: str
    mutated: str

    @property
    def fault(self) -> Fault:
        """The same as a seeded fault of the whole module."""
        return Fault(f"{self.module}:{self.line}", self.module, self.source, self.mutated)

    @property
    def key(self) -> str:
        """A name that is the same in each run on the same source."""
        digest = sha256(self.mutated.encode()).hexdigest()[:12]
        return f"{self.module}:{self.line}:{self.operator}:{digest}"

    def changed_lines(self) -> range:
        """The numbers of the lines of the source that differ, from 1."""
        old, new = self.source.splitlines(), self.mutated.splitlines()
        first = _common(old, new)
        last = len(old) - _common(old[first:][::-1], new[first:][::-1])
        return range(first + 1, max(first + 1, last) + 1)

    def change(self) -> tuple[str, str]:
        """The first changed line before and after, without indentation; "" for a line that is removed."""
        first = self.changed_lines().start - 1
        old, new = self.source.splitlines(), self.mutated.splitlines()
        shorter = len(new) < len(old)
        return old[first].strip(), "" if shorter else new[first].strip()


def _common(old: Sequence[str], new: Sequence[str]) -> int:
    """The number of equal lines at the beginning."""
    pairs = zip(old, new, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(old), len(new)))


def sample(folder: Path, packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants: each place of the source is as likely as any other, and gives at most one.

    `folder`: for the files of cosmic-ray.
    """
    places: dict[tuple[str, tuple[int, int]], list[MutationSpec]] = defaultdict(list)
    for mutation in _mutations(folder, packages):
        if not mutation.operator_name.startswith(EXCLUDED_OPERATORS):
            places[str(mutation.module_path), mutation.start_pos].append(mutation)
    random = Random(seed)
    drawn: list[Mutant] = []
    for place in random.sample(sorted(places), len(places)):
        made = [mutant for each in sorted(places[place], key=_order) if (mutant := _mutant(each)) is not None]
        drawn += random.sample(made, min(1, len(made)))
        if len(drawn) == count:
            break
    return drawn


def modules(package: str) -> list[str]:
    """The folder of a package, or the modules of it that are changed."""
    return [f"qload/{package}/{name}" for name in MODULES.get(package, ())] or [f"qload/{package}"]


def _mutant(mutation: MutationSpec) -> Mutant | None:
    """The mutant, or None if cosmic-ray cannot write it, as for the dotted name of an exception."""
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    source = (ROOT / mutation.module_path).read_text()
    try:
        mutated = mutate_code(source, operator, mutation.occurrence)
    except AttributeError:
        return None
    if mutated is None:
        return None
    module = mutation.module_path.as_posix()
    package, line = mutation.module_path.parts[1], mutation.start_pos[0]
    return Mutant(package, module, line, mutation.operator_name, source, mutated)


def _mutations(folder: Path, packages: Sequence[str]) -> Iterator[MutationSpec]:
    """Every change that cosmic-ray knows in these packages."""
    config, session = folder / "all.toml", folder / "all.sqlite"
    session.unlink(missing_ok=True)
    paths = ", ".join(f'"{path}"' for package in packages for path in modules(package))
    config.write_text(
        f"[cosmic-ray]\nmodule-path = [{paths}]\ntimeout = 1.0\nexcluded-modules = []\n"
        'test-command = "false"\n[cosmic-ray.distributor]\nname = "local"\n'
    )
    command = [sys.executable, "-m", "cosmic_ray.cli", "init", str(config), str(session)]
    subprocess.run(command, cwd=ROOT, check=True)
    with use_db(str(session), WorkDB.Mode.open) as found:
        for item in list(found.work_items):
            (mutation,) = item.mutations
            yield mutation


def _order(mutation: MutationSpec) -> tuple[str, int]:
    return mutation.operator_name, mutation.occurrence
