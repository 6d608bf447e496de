"""`num_hidden_layers` of the model's config counts layers that are all there."""

from collections.abc import Iterator

from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.rules.siblings import blocks_of
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Layers that the config counts and no tensor belongs to."""
    claimed = subject.num_hidden_layers
    blocks = {block: layers for block, layers in blocks_of(subject.names).items() if "expert" not in block}
    if claimed and not any(part.isdecimal() for name in subject.names for part in name.split(".")):
        message = f"num_hidden_layers is {claimed}, and no tensor's name has a number of a layer"
        yield rule.finding(None, "config.json", f"config.json: {message}")
    if claimed is None or not blocks:
        return
    block, layers = max(blocks.items(), key=lambda item: len(item[1]))
    there = {int(index) for index in layers}
    lost = sorted(set(range(claimed)) - there)
    if lost:
        shown = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
        yield rule.finding(
            f"{block}.{lost[0]}",
            "config.json",
            f"num_hidden_layers is {claimed}, and {len(lost)} of these layers have no tensor: {shown}",
        )


RULE = Rule("layer-count", "headers", check)
