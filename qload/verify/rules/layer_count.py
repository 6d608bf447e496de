"""`num_hidden_layers` of the model's config counts layers that are all there."""

import re
from collections.abc import Iterator

from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

# Where decoder layers stand in the names of published checkpoints.
BLOCKS = re.compile(
    r"^((?:language_model\.)?model\.(?:language_model\.)?layers|(?:transformer\.)?h|gpt_neox\.layers|layers)\.(\d+)\."
)


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Layers that the config counts and no tensor belongs to."""
    claimed = subject.num_hidden_layers
    found = [match for name in subject.names if (match := BLOCKS.match(name))]
    if claimed is None or not found:
        return
    block, there = found[0][1], {int(match[2]) for match in found}
    lost = sorted(set(range(claimed)) - there)
    if lost:
        shown = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
        yield rule.finding(
            f"{block}.{lost[0]}",
            "config.json",
            f"num_hidden_layers is {claimed}, and {len(lost)} of these layers have no tensor: {shown}",
        )


RULE = Rule("layer-count", "headers", check)
