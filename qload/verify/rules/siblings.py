"""A tensor that all the other layers of a block have is missing from one.

The rule compares `model.layers.0`, `model.layers.1`, ... and the experts of a layer by the names under
them; the stages of a vision tower lawfully differ, and are left out. Layers of a hybrid
model lawfully differ, but then neither holds a strict part of the other, or several are alike; a layer
that is alone in having strictly less than others has lost something. It cannot see what every layer
lost, nor what two layers lost alike.
"""

import re
from collections.abc import Iterator, Mapping

from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

Names = frozenset[str]

# Blocks whose members are alike, by the names of published checkpoints.
BLOCK = re.compile(
    r"(?:language_model\.)?model\.(?:language_model\.)?(?:decoder\.)?layers|(?:transformer\.)?h|gpt_neox\.layers|layers"
    r"|.*\.experts"
)


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor that one layer lacks and its siblings have."""
    for block, layers in blocks_of(subject.names).items():
        for index, names in layers.items():
            fuller = _sibling(names, layers)
            if fuller is None or sum(other == names for other in layers.values()) > 1:
                continue
            having = sum(layers[fuller] <= other for other in layers.values())
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
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts[:-1]):
            if part.isdecimal() and BLOCK.fullmatch(".".join(parts[:at])):
                members = blocks.setdefault(".".join(parts[:at]), {}).setdefault(part, set())
                members.add(".".join(parts[at + 1 :]))
    return {
        block: {index: frozenset(members) for index, members in layers.items()}
        for block, layers in blocks.items()
    }


def _sibling(names: Names, layers: Mapping[str, Names]) -> str | None:
    """The layer that has the most beyond all of these names."""
    fuller = [index for index, other in layers.items() if names < other]
    return max(fuller, key=lambda index: len(layers[index]), default=None)


RULE = Rule("missing-sibling", "headers", check)
