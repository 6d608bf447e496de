"""Names of experts' matrices in the architecture tables, and in a checkpoint."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from qload.architecture import Architecture
from qload.architecture.model_tables import TABLES
from qload.architecture.table import Row, spellings
from qload.errors import MismatchError, TwoFormatsError, UnsupportedFormatError
from qload.experts.declared_stacks import stack_names
from qload.experts.stack_layouts import LAYERS
from qload.loader import TensorSource

Naming = tuple[str, ...]  # the last parts of the names of gate, up and down, or of up and down
NUMBER = re.compile(r"0|[1-9][0-9]{,17}")  # of an expert


class NameSource(TensorSource, Protocol):
    """Tensors with a searchable list of names: `Weights`."""

    prefix: str | None
    architecture: Architecture | None

    def names_under(self, lead: str) -> Sequence[str]:
        """Stored names that begin with a lead, in order."""


@dataclass(frozen=True)
class ExpertNames:
    """Number and names of the experts under a prefix.

    Attributes
    ----------
    prefix, lead
        Prefix of the experts, and the text before it in stored names.
    naming, count
        Last parts of the names of gate, up and down, or of up and down without a gate; number of experts.
    tensors
        Number of an expert -> the rest of each stored name, in order: `gate_proj.weight`.
    """

    prefix: str
    naming: tuple[str, ...]
    count: int
    lead: str
    tensors: Mapping[int, Sequence[str]] = field(compare=False, repr=False)

    @property
    def joined(self) -> int:
        """Number of matrices that are joined in the first weight: 2 of experts with a gate, else 1."""
        return len(self.naming) - 1

    def of(self, expert: int) -> tuple[str, ...]:
        """Prefixes of one expert's matrices."""
        return tuple(f"{self.prefix}.{expert}.{last}" for last in self.naming)


@cache
def namings() -> tuple[Naming, ...]:
    """Names of experts' matrices in all architecture tables, in each spelling."""
    found: dict[Naming, None] = {}
    for table in TABLES.values():
        rows = rows_of_experts(table.rows)
        found |= dict.fromkeys(zip(*(_lasts(row.name) for row in rows), strict=True))
    return tuple(found)


def rows_of_experts(rows: Sequence[Row]) -> list[Row]:
    """Rows of a table for gate, up and down of each expert, in this order, or up and down; or none."""
    return [row for row in rows if "{expert}" in row.name and not row.tensor]


def find_experts(weights: NameSource, prefix: str) -> ExpertNames:
    """Find the names and the number of experts, by the config or else by the stored names.

    MissingTensorError for a prefix without experts; TwoFormatsError for two spellings; MismatchError for an
    expert beyond the number of the config.
    """
    lead, tensors = stored_tensors(weights, prefix)
    stored: dict[str, set[int]] = {}
    for number, rests in tensors.items():
        for rest in rests:
            stored.setdefault(rest.partition(".")[0], set()).add(number)
    _refuse_joined(prefix, stored)
    there = {naming: {n for last in naming for n in stored.get(last, ())} for naming in namings()}
    found = [naming for naming, numbers in there.items() if numbers]
    promised = _promised(weights, prefix, found or list(there))
    found = list(dict.fromkeys(_gated_or_not(naming, stored, promised) for naming in found))
    if not found:
        _refuse_stacks(weights, prefix)
        naming = promised[1] if promised else namings()[0]
        hint = f"looked for the experts of a layer: {', '.join('|'.join(one) for one in there)}"
        raise weights.missing(f"{prefix}.0.{naming[0]}.weight", hint)
    if len(found) > 1:
        first = [min(number for last in naming for number in stored.get(last, ())) for naming in found[:2]]
        names = [f"{prefix}.{number}.{naming[0]}" for number, naming in zip(first, found, strict=False)]
        expected = f"either {' or '.join(', '.join(naming) for naming in found)}"
        raise TwoFormatsError(prefix, "experts are named in two ways", expected, " and ".join(names))
    (naming,) = found
    last = max(number for name in naming for number in stored.get(name, ()))
    if promised is None:
        return ExpertNames(prefix, naming, last + 1, lead, tensors)
    count = promised[0]
    if last >= count:
        raise MismatchError(
            f"{prefix}.{last}", "an expert beyond those of the config", f"{count} experts", f"expert {last}"
        )
    return ExpertNames(prefix, naming, count, lead, tensors)


def stored_tensors(weights: NameSource, prefix: str) -> tuple[str, dict[int, list[str]]]:
    """Text before the prefix in stored names, and the rests of these names by the number of the expert."""
    found: dict[int, list[str]] = {}
    for lead in ("", *([f"{weights.prefix}."] if weights.prefix else [])):
        start = f"{lead}{prefix}."
        digits, rests = "", list[str]()
        for name in weights.names_under(start):
            number, _, rest = name[len(start) :].partition(".")
            if number != digits:
                digits, rests = number, []
                if NUMBER.fullmatch(number):
                    found[int(number)] = rests
            rests.append(rest)
        if found:
            return lead, found
    return "", found


def _gated_or_not(
    naming: Naming, stored: Mapping[str, set[int]], promised: tuple[int, Naming] | None
) -> Naming:
    """Naming of experts with these names of up and down: with a gate if one is stored or in the table."""
    if promised is not None and promised[1][-2:] == naming[-2:]:
        return promised[1]
    gated = (other for other in namings() if other[-2:] == naming[-2:] and len(other) > 2)
    return next((other for other in gated if other[0] in stored), naming[-2:])


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


def _refuse_stacks(weights: NameSource, prefix: str) -> None:
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
    """Last part of a pattern's name in each spelling; gate, up and down have their spellings in one order."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in spellings(pattern)))


def _promised(weights: NameSource, prefix: str, tried: Sequence[Naming]) -> tuple[int, Naming] | None:
    """Number of experts by the config, and their names in its architecture table; None if unknown."""
    architecture = weights.architecture
    count = None if architecture is None else architecture.sizes.get("experts")
    if architecture is None or count is None:
        return None
    for lead in (prefix, f"{weights.prefix}.{prefix}") if weights.prefix else (prefix,):
        for naming in tried:
            if architecture.find(f"{lead}.0.{naming[0]}") is not None:
                return count, naming
    return None
