"""Which tensors are of one kind, by their names: the same one of other layers, and those of one block.

Only names tell here. `model.layers.3.mlp.up_proj.qweight` is of the kind
`model.layers.*.mlp.up_proj.qweight`, with the `up_proj` of all other layers.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache

# Blocks whose members are alike, by the names of published checkpoints.
BLOCK = re.compile(
    r"(?:language_model\.)?model\.(?:language_model\.)?(?:decoder\.)?layers|(?:transformer\.)?h|gpt_neox\.layers|layers"
    r"|.*\.experts"
)

# Projections of one input, which a quantizer treats alike.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
UNLIKE = re.compile(r"embed|lm_head|lora|adapter|wte|wpe|shared_head")  # tensors that may be copies, or empty
MATRICES = (".weight", "_proj")  # of plain layers; other tensors, as masks and tables of positions, are none


def is_matrix(name: str) -> bool:
    """Whether a plain tensor of several axes is a layer's matrix, or of a stack of them."""
    return name.endswith(MATRICES)


@cache
def _is_block(lead: str) -> bool:
    return BLOCK.fullmatch(lead) is not None


def kind(name: str) -> str:
    """The name with a star for each number."""
    return NUMBER.sub("*", name)


def block(name: str) -> str | None:
    """The layer of the model that a name belongs to, as `model.layers.3`; None where it is in none."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdecimal() and _is_block(".".join(parts[:at])):
            return ".".join(parts[: at + 1])
    return None


def kinds(names: Iterable[str]) -> Mapping[str, list[str]]:
    """kind -> the names of it, in their order."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(kind(name), []).append(name)
    return found


def siblings(prefixes: Iterable[str]) -> Mapping[str, list[str]]:
    """The first of each set of projections that share their inputs -> all that are there, if several."""
    there = set(prefixes)
    found = {}
    for prefix in sorted(there):
        parent, dot, last = prefix.rpartition(".")
        for names in SIBLINGS:
            if last in names:
                together = [f"{parent}{dot}{name}" for name in names if f"{parent}{dot}{name}" in there]
                if together[0] == prefix and len(together) > 1:
                    found[prefix] = together
    return found
