"""Which mutants are made: a seeded sample over the places of the code where one is possible."""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkItem

ARGUMENTS = "tests/meta/test_argument_types.py"
RECORDS = "tests/meta/test_dataclasses.py"
# package of qload -> the tests that judge its mutants, those first that kill most of them in the least time.
TESTS = {
    "storage": ("tests/storage", ARGUMENTS, RECORDS),
    "detect": ("tests/detect", "tests/weights", "tests/architecture", "tests/listing", ARGUMENTS, RECORDS),
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
    "listing": ("tests/listing", "tests/architecture", ARGUMENTS, RECORDS),
    "architecture": ("tests/architecture", "tests/listing", "tests/weights/test_heads.py", RECORDS),
}
# Of packages that other tests judge, the modules that say what native code may read.
MODULES = {"devices": ("operands.py",)}
TESTS |= {"devices": ("tests/spec/test_borders.py", RECORDS)}
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
    drawn = []
    for place in random.sample(sorted(places), len(places)):
        makeable = [item for item in sorted(places[place], key=_order) if _is_made(root, item)]
        drawn += random.sample(makeable, min(1, len(makeable)))
        if len(drawn) == count:
            break
    return drawn


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


def modules(package: str) -> list[str]:
    """The folder of a package, or the modules of it that are changed."""
    return [f"qload/{package}/{name}" for name in MODULES.get(package, ())] or [f"qload/{package}"]


def package_of(item: WorkItem) -> str:
    """The package of qload that a mutant changes."""
    return item.mutations[0].module_path.parts[1]


def _is_made(root: Path, item: WorkItem) -> bool:
    """Whether cosmic-ray can write it: it stumbles over the dotted name of an exception."""
    (mutation,) = item.mutations
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    try:
        return (
            mutate_code((root / mutation.module_path).read_text(), operator, mutation.occurrence) is not None
        )
    except AttributeError:
        return False


def _all(root: Path, folder: Path, packages: Sequence[str]) -> list[WorkItem]:
    """Every mutant that cosmic-ray knows of these packages."""
    config, session = folder / "all.toml", folder / "all.sqlite"
    session.unlink(missing_ok=True)
    config.write_text(configuration([path for package in packages for path in modules(package)], "all"))
    command = [sys.executable, "-m", "cosmic_ray.cli", "init", str(config), str(session)]
    subprocess.run(command, cwd=root, check=True)
    with use_db(str(session), WorkDB.Mode.open) as found:
        return list(found.work_items)


def configuration(changed: Sequence[str], package: str) -> str:
    """What cosmic-ray reads; a test that hangs is killed after five minutes, and its mutant with it."""
    paths = ", ".join(f'"{module}"' for module in changed)
    return (
        f"[cosmic-ray]\nmodule-path = [{paths}]\ntimeout = 300.0\nexcluded-modules = []\n"
        f'test-command = "{sys.executable} -m tests.mutants.choose {package}"\n'
        '[cosmic-ray.distributor]\nname = "local"\n'
    )


def _order(item: WorkItem) -> tuple[str, int]:
    return item.mutations[0].operator_name, item.mutations[0].occurrence
