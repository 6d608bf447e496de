"""The rules, in the order in which they run: headers, then values, then meaning."""

from qload.verify.rules import (
    act_order,
    architecture_head,
    architecture_missing,
    architecture_shape,
    bias,
    cache_scales,
    claimed,
    empty,
    fields,
    floats,
    groups,
    layer_count,
    layers,
    overflow,
    scales,
    siblings,
    side_files,
    symmetry,
    unexplained,
)
from qload.verify.rules.rule import Rule, Tier

RULES: tuple[Rule, ...] = (
    side_files.RULE,
    layers.RULE,
    empty.RULE,
    claimed.RULE,
    bias.RULE,
    siblings.RULE,
    layer_count.RULE,
    architecture_missing.RULE,
    architecture_shape.RULE,
    architecture_head.PLAIN,
    unexplained.RULE,
    scales.RULE,
    cache_scales.RULE,
    overflow.RULE,
    floats.RULE,
    architecture_head.TIED,
    fields.RULE,
    groups.RULE,
    act_order.RULE,
    symmetry.RULE,
)

# What `inspect` reports beside the layers that contradict themselves: headers tell it all.
INSPECTED: tuple[Rule, ...] = (
    empty.RULE,
    claimed.RULE,
    bias.RULE,
    architecture_shape.RULE,
    unexplained.RULE,
)

__all__ = ["INSPECTED", "RULES", "Rule", "Tier"]
