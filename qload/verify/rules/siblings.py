"""A tensor that all the other layers of a block have is missing from one.

The rule compares `model.layers.0`, `model.layers.1`, ... and the experts of a layer by the names under
them; the stages of a vision tower lawfully differ, and are left out. Layers of a hybrid
model lawfully differ, but then neither holds a strict part of the other, or several are alike; a layer
that is alone in having strictly less than others has lost something. It cannot see what every layer
lost, nor what two layers lost alike.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

from qload.verify.kin import BLOCK
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

Names = frozenset[str]


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor that one layer lacks and its siblings have."""
    for block, layers in blocks_of(subject.names).items():
        alike = Counter(layers.values())
        if len(alike) == 1:
            continue
        supersets = _Supersets(layers)
        for index, names in layers.items():
            if alike[names] > 1:
                continue
            fuller = supersets.fullest(names)
            if fuller is None:
                continue
            having = sum(alike[other] for other in supersets.holding(layers[fuller]))
            for lost in sorted(layers[fuller] - names):
                yield rule.finding(
                    f"{block}.{index}.{lost}",
                    None,
                    f"{block}.{index}.{lost}: missing, and {having} of its {len(layers) - 1} siblings "
                    f"have it, such as {block}.{fuller}.{lost}",
                    "fetch or write the checkpoint again",
                )


def blocks_of(names: list[str]) -> Mapping[str, Mapping[str, Names]]:
    """`model.layers` -> its indices -> the names under each."""
    blocks: dict[str, dict[str, set[str]]] = {}
    is_block = cache(lambda lead: BLOCK.fullmatch(lead) is not None)
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts[:-1]):
            if part.isdecimal() and is_block(".".join(parts[:at])):
                members = blocks.setdefault(".".join(parts[:at]), {}).setdefault(part, set())
                members.add(".".join(parts[at + 1 :]))
    return {
        block: {index: frozenset(members) for index, members in layers.items()}
        for block, layers in blocks.items()
    }


class _Supersets:
    """Which layers have all of some names: only those that have the rarest of them are asked."""

    def __init__(self, layers: Mapping[str, Names]) -> None:
        self._first: dict[Names, str] = {}  # of layers that are alike, the first; in the order of layers
        for index, names in layers.items():
            self._first.setdefault(names, index)
        self._having: dict[str, list[Names]] = {}
        for names in self._first:
            for name in names:
                self._having.setdefault(name, []).append(names)

    def holding(self, names: Names) -> Iterator[Names]:
        """Each set of names that holds all of these, once."""
        rarest = min((self._having[name] for name in names), key=len)
        return (other for other in rarest if names <= other)

    def fullest(self, names: Names) -> str | None:
        """The first layer of those that have the most beyond all of these names."""
        fuller = [other for other in self.holding(names) if len(other) > len(names)]
        return self._first[max(fuller, key=len)] if fuller else None


RULE = Rule("missing-sibling", "headers", check)
