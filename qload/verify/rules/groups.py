"""Every group of a GPTQ layer has the rows that its group size says.

Act order permutes which rows belong to a group, never how many. An index with other counts reads every
row with some scale, and most with a wrong one.
"""

from collections.abc import Iterator

import torch

from qload.formats import GPTQConfig
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each layer with a group that has too few or too many rows."""
    for layer in subject.described():
        config = layer.format.config
        if not (isinstance(config, GPTQConfig) and config.indexed):
            continue
        G, K = layer.sizes["G"], layer.K
        expected = torch.bincount(config.in_order(K), minlength=G)
        counts = torch.bincount(layer.facts["g_idx"].long(), minlength=G)
        wrong = torch.nonzero(counts != expected).flatten()
        if wrong.numel():
            first, name = int(wrong[0]), f"{layer.prefix}.g_idx"
            yield rule.finding(
                name,
                layer.names.file("g_idx"),
                f"{name}: group {first} has {int(counts[first])} rows, a group size of {config.group_size} "
                f"over K = {K} gives it {int(expected[first])}; {wrong.numel()} of {G} groups are wrong",
            )


RULE = Rule("group-count", "meaning", check, each=True)
