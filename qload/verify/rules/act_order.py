"""`desc_act: false` means that no layer is in act order.

Engines that trust the flag drop `g_idx`, and read every row with another row's scale. The opposite,
`desc_act: true` over groups in order, is lawful (static groups) and only noted.
"""

from collections.abc import Iterator

import torch

from qload.spec import Grouped
from qload.verify.report import Contradiction, Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

# Index of groups -> the claim of a config that denies act order.
INDICES = {"g_idx": "desc_act is false", "weight_g_idx": "actorder is none or weight"}


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each layer in act order that the config denies."""
    if subject.claims is None:
        return
    file = subject.claims.file
    for layer in subject.described():
        config, claims = layer.format.config, layer.format.claims
        index = next((spec.name for spec in layer.specs if spec.name in INDICES), None)
        if claims is None or claims.desc_act is not False or index is None or not isinstance(config, Grouped):
            continue
        if getattr(config, "indexed", True) is False:  # an index of zeros stands for groups in order
            continue
        g_idx, in_order = layer.facts[index], config.in_order(layer.K)
        apart = torch.nonzero(g_idx != in_order).flatten()
        if apart.numel():
            first, name, key = int(apart[0]), layer.names.full(index), INDICES[index]
            stated = claims.says("desc_act").replace("desc_act is false", key)
            right = "actorder to group" if index == "weight_g_idx" else "desc_act to true"
            remedy = f"set {right} in {claims.place(file)}"
            yield rule.contradiction(
                name,
                layer.names.file(index),
                f"{name}: row {first} is in group {int(g_idx[first])}, in order it would be in "
                f"{int(in_order[first])}; {file} says {stated}",
                f"{remedy}, if the layer was quantized in act order",
                Contradiction(claims, stated, f"are in act order by {index}", remedy),
            )


RULE = Rule("act-order", "meaning", check, each=True)
