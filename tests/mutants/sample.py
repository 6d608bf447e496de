"""Which mutants are made: a seeded sample over the places of the code where one is possible."""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkItem

# package of qload -> the tests that judge its mutants.
TESTS = {
    "storage": ("tests/storage",),
    "detect": ("tests/detect", "tests/weights"),
    "verify": ("tests/verify",),
    "weights": ("tests/weights", "tests/loader"),
    "loader": ("tests/loader", "tests/weights", "tests/contract/test_loading.py"),
    "spec": ("tests/spec", "tests/loader", "tests/formats/test_gptq.py"),
    "formats": ("tests/formats", "tests/loader"),
}
# Unions stand in annotations nearly always, where a mutant cannot even be imported: that tells nothing.
TELLS_NOTHING = "core/ReplaceBinaryOperator_BitOr_"
SLOW = ("verify", "formats")
SIZE = 10  # mutants of a chunk: few enough that the last ones to finish leave no job idle for long


@dataclass(frozen=True)
class Chunk:
    """Mutants of one package, in a session of cosmic-ray of their own."""

    package: str
    items: tuple[WorkItem, ...]
    session: Path
    config: Path


def sample(root: Path, folder: Path, packages: Sequence[str], count: int, seed: int) -> list[WorkItem]:
    """`count` mutants: each place of the code is as likely as any other, and gives one mutant at most."""
    places: dict[tuple[str, tuple[int, int]], list[WorkItem]] = defaultdict(list)
    for item in _all(root, folder, packages):
        (mutation,) = item.mutations
        if not mutation.operator_name.startswith(TELLS_NOTHING):
            places[str(mutation.module_path), mutation.start_pos].append(item)
    random = Random(seed)
    drawn = random.sample(sorted(places), min(count, len(places)))
    return [random.choice(sorted(places[place], key=_order)) for place in drawn]


def chunks(items: Sequence[WorkItem], folder: Path) -> list[Chunk]:
    """The mutants in chunks of one package each; packages whose tests take long come first."""
    by_package: dict[str, list[WorkItem]] = defaultdict(list)
    for item in items:
        by_package[package_of(item)].append(item)
    made = []
    slowest_first = sorted(by_package, key=lambda name: (name not in SLOW, name))
    for package in slowest_first:
        own = by_package[package]
        for start in range(0, len(own), SIZE):
            name = folder / f"{package}-{start}"
            made.append(
                Chunk(
                    package,
                    tuple(own[start : start + SIZE]),
                    name.with_suffix(".sqlite"),
                    name.with_suffix(".toml"),
                )
            )
    return made


def package_of(item: WorkItem) -> str:
    """The package of qload that a mutant changes."""
    return item.mutations[0].module_path.parts[1]


def _all(root: Path, folder: Path, packages: Sequence[str]) -> list[WorkItem]:
    """Every mutant that cosmic-ray knows of these packages."""
    config, session = folder / "all.toml", folder / "all.sqlite"
    config.write_text(configuration([f"qload/{package}" for package in packages], ()))
    command = [sys.executable, "-m", "cosmic_ray.cli", "init", str(config), str(session)]
    subprocess.run(command, cwd=root, check=True)
    with use_db(str(session), WorkDB.Mode.open) as found:
        return list(found.work_items)


def configuration(modules: Sequence[str], tests: Sequence[str]) -> str:
    """What cosmic-ray reads; a test that hangs is killed after five minutes, and its mutant with it."""
    paths = ", ".join(f'"{module}"' for module in modules)
    pytest = (
        f"{sys.executable} -m pytest -x -q -p no:cacheprovider -m 'not gpu' --hypothesis-profile=faults",
        *tests,
    )
    return (
        f"[cosmic-ray]\nmodule-path = [{paths}]\ntimeout = 300.0\nexcluded-modules = []\n"
        f'test-command = "{" ".join(pytest)}"\n[cosmic-ray.distributor]\nname = "local"\n'
    )


def _order(item: WorkItem) -> tuple[str, int]:
    return item.mutations[0].operator_name, item.mutations[0].occurrence
