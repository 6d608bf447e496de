"""The rules, in the order in which they run: headers, then values, then meaning."""

from qload.verify.rules import (
    act_order,
    bias,
    block_maximum,
    claimed,
    claimed_detail,
    code_order,
    constants,
    copies,
    empty,
    fields,
    float_types,
    floats,
    group_sizes,
    grouping,
    groups,
    holes,
    layer_count,
    layers,
    outliers,
    overflow,
    repeats,
    scales,
    siblings,
    side_files,
    sizes,
    symmetry,
    unexplained,
    zero_means,
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
    unexplained.RULE,
    claimed_detail.RULE,
    scales.RULE,
    overflow.RULE,
    floats.RULE,
    fields.RULE,
    constants.RULE,
    holes.RULE,
    repeats.RULE,
    copies.RULE,
    sizes.RULE,
    outliers.RULE,
    float_types.RULE,
    block_maximum.RULE,
    groups.RULE,
    act_order.RULE,
    grouping.RULE,
    group_sizes.RULE,
    symmetry.RULE,
    zero_means.RULE,
    code_order.RULE,
)

# What `inspect` reports beside the layers that contradict themselves: headers tell it all.
INSPECTED: tuple[Rule, ...] = (empty.RULE, claimed.RULE, bias.RULE)

__all__ = ["INSPECTED", "RULES", "Rule", "Tier"]
