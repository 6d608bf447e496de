"""Rows are in the groups that they were quantized in.

Projections of one input are in one act order: a quantizer sorts its rows by the input alone. And a group's
scale is that of its own largest weight, so that most groups reach an end of the codes' range; no more of
them do than of random groups where the index of groups was lost, or is another layer's.
"""

from collections.abc import Iterator

import torch

from qload.loader import LayerDescription
from qload.verify.kin import siblings
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

GROUPS = 512  # of which shares are taken, at least
GAIN = 0.02  # sound layers of 512 groups: 0.08 and more; of lost indices -0.02 to 0.01
ALL = 0.97  # a share of groups beyond which all groupings are alike
BITS = (4, 8)


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each projection in another order than its siblings; each layer whose groups are as good as random."""
    layers = {layer.prefix: layer for layer in subject.described()}
    indexed = [prefix for prefix, layer in layers.items() if _has_index(layer)]
    for together in siblings(indexed).values():
        first, *others = (layers[prefix] for prefix in together)
        apart = [other for other in others if _differs(first, other)]
        for other in apart:
            name = other.names.full("g_idx")
            yield rule.finding(
                name,
                other.names.file("g_idx"),
                f"{name}: not the act order of {first.names.full('g_idx')}, which has the same inputs",
            )
    for prefix in indexed:
        claims = layers[prefix].format.claims
        denied = claims is not None and claims.desc_act is False
        if not (denied and _in_order(layers[prefix])):  # where no order is claimed, none was lost
            yield from _lost(rule, subject, layers[prefix])


def _has_index(layer: LayerDescription) -> bool:
    """Return whether `g_idx` gives the groups of a layer; with an index of zeros they are in order."""
    return any(spec.name == "g_idx" and spec.index_of == "G" for spec in layer.specs)


def _differs(one: LayerDescription, other: LayerDescription) -> bool:
    """Whether two projections of as many groups have them in different orders."""
    here, there = one.facts["g_idx"], other.facts["g_idx"]
    same = one.K == other.K and one.sizes["G"] == other.sizes["G"]
    return same and not torch.equal(here.long(), there.long())


def _in_order(layer: LayerDescription) -> bool:
    return bool((layer.facts["g_idx"].diff() >= 0).all())


def _lost(rule: Rule, subject: Subject, layer: LayerDescription) -> Iterator[Finding]:
    found = subject.values.statistics.get(layer.prefix)
    if found is None or found.reach is None or found.shuffled is None or found.bits not in BITS:
        return
    if found.groups >= GROUPS and found.reach < ALL and found.reach - found.shuffled < GAIN:
        name = layer.names.full("g_idx")
        yield rule.finding(
            name,
            layer.names.file("g_idx"),
            f"{name}: {found.reach:.3f} of {found.groups} groups reach an end of the codes' range, of groups "
            f"of random rows {found.shuffled:.3f}: the rows were quantized in other groups",
        )


RULE = Rule("group-order", "meaning", check)
