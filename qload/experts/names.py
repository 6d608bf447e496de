"""What the matrices of experts are called: the names of the architecture tables, told by what is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from qload.architecture import Architecture
from qload.architecture.model_tables import TABLES
from qload.architecture.table import Row, spellings
from qload.errors import MismatchError, TwoFormatsError, UnsupportedFormatError
from qload.experts.stack_layouts import LAYERS, stack_names
from qload.loader import TensorSource

Naming = tuple[str, str, str]  # the last parts of the names of gate, up and down
DIGITS = 18  # of an expert's number; a longer one is none


class Holder(TensorSource, Protocol):
    """What `Weights` is here."""

    prefix: str | None
    architecture: Architecture | None

    def names_under(self, lead: str) -> Sequence[str]:
        """All stored names that begin with a lead."""


@dataclass(frozen=True)
class ExpertNames:
    """The experts under a prefix: how many, and what their matrices are called.

    `lead`: what stored names have before the prefix.
    """

    prefix: str
    naming: Naming
    count: int
    lead: str = ""

    def of(self, expert: int) -> Naming:
        """The prefixes of gate, up and down of one expert."""
        gate, up, down = (f"{self.prefix}.{expert}.{last}" for last in self.naming)
        return gate, up, down


@cache
def namings() -> tuple[Naming, ...]:
    """Of every table with experts the names of their matrices, in each spelling."""
    found: dict[Naming, None] = {}
    for table in TABLES.values():
        rows = rows_of_experts(table.rows)
        for gate, up, down in zip(*(_lasts(row.name) for row in rows), strict=True):
            found[gate, up, down] = None
    return tuple(found)


def rows_of_experts(rows: Sequence[Row]) -> list[Row]:
    """The rows of gate, up and down of each expert, in this order; none where there are no experts."""
    return [row for row in rows if "{expert}" in row.name and not row.tensor]


def names_of(weights: Holder, prefix: str) -> ExpertNames:
    """What experts are stored as, and how many there are: as the config says, or the names do.

    MissingTensorError where there is nothing; TwoFormatsError for experts in two spellings; MismatchError for
    an expert that the config does not count.
    """
    lead, stored = _stored(weights, prefix)
    _refuse_joined(prefix, stored)
    there = {naming: {n for last in naming for n in stored.get(last, ())} for naming in namings()}
    found = [naming for naming, numbers in there.items() if numbers]
    promised = _promised(weights, prefix, found or list(there))
    if not found:
        _refuse_stacks(weights, prefix)
        naming = promised[1] if promised else namings()[0]
        hint = f"looked for the experts of a layer: {', '.join('|'.join(one) for one in there)}"
        raise weights.missing(f"{prefix}.0.{naming[0]}.weight", hint)
    if len(found) > 1:
        names = [f"{prefix}.{min(there[naming])}.{naming[0]}" for naming in found[:2]]
        raise TwoFormatsError(
            prefix,
            "experts are named in two ways",
            f"either {' or '.join(', '.join(naming) for naming in found)}",
            " and ".join(names),
        )
    (naming,), last = found, max(there[found[0]])
    if promised is None:
        return ExpertNames(prefix, naming, last + 1, lead)
    count = promised[0]
    if last >= count:
        raise MismatchError(
            f"{prefix}.{last}", "an expert beyond those of the config", f"{count} experts", f"expert {last}"
        )
    return ExpertNames(prefix, naming, count, lead)


def _refuse_joined(prefix: str, stored: Mapping[str, set[int]]) -> None:
    """Raise UnsupportedFormatError for experts with gate and up joined in an unknown order."""
    joined = next((name for name in stored if len(LAYERS.get(name, ())) > 1), None)
    if joined is not None:
        name = f"{prefix}.{min(stored[joined])}.{joined}"
        raise UnsupportedFormatError(
            f"{prefix}: gate and up in one matrix",
            f"the order of gate and up in {name} is unknown",
            remedy=f"load both as stored: get_weights({name!r})",
        )


def _refuse_stacks(weights: Holder, prefix: str) -> None:
    """Raise UnsupportedFormatError for plain stacks of experts with unknown axes."""
    for lead in ("", *([f"{weights.prefix}."] if weights.prefix else [])):
        stored = set(weights.names_under(f"{lead}{prefix}."))
        for matrix in LAYERS:
            for name in stack_names(f"{lead}{prefix}.{matrix}"):
                if name in stored and len(shape := weights.info(name).shape) > 2:
                    raise UnsupportedFormatError(
                        f"{prefix}: experts in one tensor",
                        f"the order of outputs and inputs in {name} of shape {list(shape)} is unknown",
                        remedy=f"read it as stored: get_tensor({name!r})",
                    )


def _lasts(pattern: str) -> list[str]:
    """The last part of a pattern's name in each spelling: a triple's spellings stand in one order."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in spellings(pattern)))


def _stored(weights: Holder, prefix: str) -> tuple[str, dict[str, set[int]]]:
    """What names have before the prefix; by the name of a matrix, the numbers of the experts that have it."""
    found: dict[str, set[int]] = {}
    for lead in ("", *([f"{weights.prefix}."] if weights.prefix else [])):
        start = f"{lead}{prefix}."
        for name in weights.names_under(start):
            number, _, rest = name[len(start) :].partition(".")
            if (
                len(number) <= DIGITS
                and number.isascii()
                and number.isdecimal()
                and str(int(number)) == number
            ):
                found.setdefault(rest.partition(".")[0], set()).add(int(number))
        if found:
            return lead, found
    return "", found


def _promised(weights: Holder, prefix: str, tried: Sequence[Naming]) -> tuple[int, Naming] | None:
    """How many experts the config counts under a prefix, and how its own table spells them."""
    architecture = weights.architecture
    if architecture is None:
        return None
    for lead in (prefix, f"{weights.prefix}.{prefix}") if weights.prefix else (prefix,):
        for naming in tried:
            place = architecture.find(f"{lead}.0.{naming[0]}")
            count = architecture.sizes.get("experts")
            if place is not None and place.expert is not None and count is not None:
                return count, naming
    return None
