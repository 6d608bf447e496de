"""Sizes of stacked experts that a model's config states."""

from collections.abc import Mapping
from typing import Any

from qload.architecture.architecture import INNER


def read_block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Read (outputs, inputs) of scale blocks from the config; None if it states no valid one."""
    section = config.get("quantization_config")
    if not isinstance(section, dict):
        return None
    size = section.get("weight_block_size")
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        size = size or (weights.get("block_structure") if isinstance(weights, dict) else None)
    if not isinstance(size, list) or len(size) != 2:
        return None
    return (size[0], size[1]) if all(type(side) is int and side > 0 for side in size) else None


def read_hidden_size(config: Mapping[str, Any]) -> int | None:
    """Read the hidden size of a model of any type; None if the config does not state it."""
    for place in (config, *(config.get(key) for key in INNER)):
        size = place.get("hidden_size") if isinstance(place, dict | Mapping) else None
        if type(size) is int and size > 0:
            return size
    return None
