"""`desc_act: false` means that no layer is in act order.

Engines that trust the flag drop `g_idx`, and read every row with another row's scale. The opposite,
`desc_act: true` over groups in order, is lawful (static groups) and only noted.
"""

from collections.abc import Iterator

import torch

from qload.formats import GPTQConfig
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each layer in act order that the config denies."""
    claims = subject.claims
    if claims is None or claims.desc_act is None:
        return
    for layer in subject.described():
        if not (isinstance(layer.format.config, GPTQConfig) and layer.format.config.indexed):
            continue
        g_idx, in_order = layer.facts["g_idx"], layer.format.config.in_order(layer.K)
        apart = torch.nonzero(g_idx != in_order).flatten()
        if apart.numel() and not claims.desc_act:
            first, name = int(apart[0]), f"{layer.prefix}.g_idx"
            yield rule.finding(
                name,
                layer.names.file("g_idx"),
                f"{name}: row {first} is in group {int(g_idx[first])}, in order it would be in "
                f"{int(in_order[first])}; {claims.file} says desc_act is false",
                f"set desc_act to true in {claims.file}, if the layer was quantized in act order",
            )


RULE = Rule("act-order", "meaning", check, each=True)
