"""Patterns of tensor names: the transformer block of a tensor, and tensors of one name in other blocks.

`model.layers.3.mlp.up_proj.qweight` has the pattern `model.layers.*.mlp.up_proj.qweight`, like the `up_proj`
of all other blocks.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache

# Lists of blocks with equal members, by the names of published checkpoints.
BLOCK_LIST = re.compile(
    r"(?:language_model\.)?model\.(?:language_model\.)?(?:decoder\.)?layers|(?:transformer\.)?h|gpt_neox\.layers|layers"
    r"|.*\.experts"
)

# Projections with one input, quantized in the same way.
PROJECTION_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
# Tensors that may be copies of others, or empty.
NOT_A_LAYER = re.compile(r"embed|lm_head|lora|adapter|wte|wpe|shared_head")
MATRIX_ENDINGS = (".weight", "_proj")  # of plain layers; masks and tables of positions have others


def is_matrix_name(name: str) -> bool:
    """Return whether a plain tensor of several axes is a layer's matrix, or a stack of matrices."""
    return name.endswith(MATRIX_ENDINGS)


@cache
def is_block_list(lead: str) -> bool:
    """Return whether numbered blocks with equal members follow these segments of a name."""
    return BLOCK_LIST.fullmatch(lead) is not None


def pattern_of(name: str) -> str:
    """Return the name with a star for each number."""
    return NUMBER.sub("*", name)


def block_of(name: str) -> str | None:
    """Return the transformer block of a name, as `model.layers.3`; None outside of blocks."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdecimal() and is_block_list(".".join(parts[:at])):
            return ".".join(parts[: at + 1])
    return None


def group_by_pattern(names: Iterable[str]) -> Mapping[str, list[str]]:
    """Return pattern -> its names, in their order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern_of(name), []).append(name)
    return groups


def projection_groups(prefixes: Iterable[str]) -> Mapping[str, list[str]]:
    """Return the first stored projection of each group with one input -> all stored ones, if several."""
    stored = set(prefixes)
    groups = {}
    for prefix in sorted(stored):
        parent, dot, last = prefix.rpartition(".")
        for names in PROJECTION_GROUPS:
            if last in names:
                together = [f"{parent}{dot}{name}" for name in names if f"{parent}{dot}{name}" in stored]
                if together[0] == prefix and len(together) > 1:
                    groups[prefix] = together
    return groups
