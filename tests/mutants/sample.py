"""Mutants of qload: a seeded sample over the modules, the kinds of changes and their places."""

import ast
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.faults.fault import Fault
from tests.mutants.mistakes import mistakes
from tests.paths import ROOT

MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "qload").rglob("*.py"))
# Unions are nearly always annotations; a mutant of one cannot even be imported, and so shows nothing.
EXCLUDED_OPERATORS = "core/ReplaceBinaryOperator_BitOr_"
Place = tuple[str, int, Callable[[str], str | None]]  # operator, line, and the text that it writes


@dataclass(frozen=True)
class Mutant:
    """One place of a module of qload, changed by one operator."""

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
        changed = self.changed_lines()
        old, new = self.source.splitlines(), self.mutated.splitlines()
        # A removed decorator takes the blank lines before it along.
        first = next((line - 1 for line in changed if old[line - 1].strip()), changed.start - 1)
        shorter = len(new) < len(old)
        return old[first].strip(), "" if shorter else new[first].strip()


def _common(old: Sequence[str], new: Sequence[str]) -> int:
    """The number of equal lines at the beginning."""
    pairs = zip(old, new, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(old), len(new)))


def package_of(module: str) -> str:
    """The package of a module, or its own name at the top."""
    return Path(module).parts[1].removesuffix(".py")


PACKAGES = sorted(set(map(package_of, MODULES)))


def sample(packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants: modules by their length, then a kind of change, then a place; each place once."""
    random = Random(seed)
    paths = [module for module in MODULES if package_of(module) in packages]
    lengths = [len((ROOT / path).read_text().splitlines()) for path in paths]
    drawn: dict[tuple[str, str, int], Mutant] = {}
    while len(drawn) < count:
        mutant = _draw(random.choices(paths, lengths)[0], random)
        if mutant is not None:
            drawn.setdefault((mutant.module, mutant.operator, mutant.line), mutant)
    return list(drawn.values())


def _draw(module: str, random: Random) -> Mutant | None:
    """A mutant of a module, or None if the one drawn has no other meaning, as in an annotation."""
    text = (ROOT / module).read_text()
    kinds = _places(module)
    if not kinds:
        return None
    kind = random.choice(sorted(kinds))
    operator, line, write = random.choice(kinds[kind])
    try:
        mutated = write(text)
        changed = mutated is not None and _meaning(mutated) != _meaning(text)
    except (AttributeError, SyntaxError):  # cosmic-ray cannot write the dotted name of an exception
        return None
    if mutated is None or not changed:
        return None
    return Mutant(package_of(module), module, line, operator, text, mutated)


def _meaning(text: str) -> str:
    """The syntax tree, without `strict` of `zip`: the sequences have one length in a sound program."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords = [each for each in node.keywords if each.arg != "strict"]
    return ast.dump(tree)


@cache
def _places(module: str) -> dict[str, list[Place]]:
    """Every change of a module, by kinds of operators: the operator, the line and a writing function."""
    text = (ROOT / module).read_text()
    kinds: dict[str, list[Place]] = defaultdict(list)
    for mistake in mistakes(text):
        kinds[mistake.operator].append((mistake.operator, mistake.line, mistake.apply))
    nodes = list(ast_nodes(get_ast(text)))
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments() or name.startswith(EXCLUDED_OPERATORS):
            continue
        positions = [start for node in nodes for start, _ in operator().mutation_positions(node)]
        for occurrence, (line, _) in enumerate(positions):
            write = partial(_write, operator, occurrence)
            kinds[name.split("_")[0]].append((name, line, write))
    return kinds


def _write(operator: Callable[[], Any], occurrence: int, text: str) -> str | None:
    written: str | None = mutate_code(text, operator(), occurrence)
    return written
