"""Rules of groups: act order, the size of groups, the rows of each, and their order.

Engines that trust `desc_act: false` drop `g_idx`, and read every row with another row's scale. The opposite,
`desc_act: true` with groups in order (static groups), is lawful and only noted. Act order permutes the rows
of groups and never changes their number.

Projections of one input have one act order, because a quantizer sorts their rows by the input alone. A
group's scale comes from its largest weight, so that most groups reach an end of the codes' range; in the
groups of a lost or foreign index no more groups do than in random groups. If K is not a multiple of the group
size, a smaller size makes as many groups of equal size; in the quantizer's own groups more reach an end.
"""

from collections.abc import Iterator

import torch

from qload.architecture.names import projection_groups
from qload.formats import GPTQConfig
from qload.loader import LayerDescription
from qload.spec import Grouped
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Contradiction, Finding
from qload.verify.rules.rule import Rule

# Index of groups -> the claim of a config that denies act order.
DENYING_CLAIMS = {"g_idx": "desc_act is false", "weight_g_idx": "actorder is none or weight"}

# group-order
MIN_ORDER_GROUPS = 512  # groups of a layer with a usable share
MIN_ORDER_GAIN = 0.02  # sound layers of 512 groups: 0.08 and more; of lost indices -0.02 to 0.01
MAX_REACH = 0.97  # share of groups; above it all groupings are equal
CHECKED_BITS = (4, 8)

# group-size
MIN_SIZE_GROUPS = 64  # groups of a layer with a usable share
MIN_SIZE_GAIN = 0.03  # by which the other size has to be better
MIN_SIZE_LAYERS = 3  # layers, if all of their few groups agree


def check_group_counts(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each GPTQ layer with a group of too few or too many rows."""
    for layer in checkpoint.described():
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


def check_act_order(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each layer in act order that the config denies."""
    if checkpoint.claims is None:
        return
    file = checkpoint.claims.file
    for layer in checkpoint.described():
        config, claims = layer.format.config, layer.format.claims
        index = next((spec.name for spec in layer.specs if spec.name in DENYING_CLAIMS), None)
        if claims is None or claims.desc_act is not False or index is None or not isinstance(config, Grouped):
            continue
        if getattr(config, "indexed", True) is False:  # an index of zeros means groups in order
            continue
        g_idx, in_order = layer.facts[index], config.in_order(layer.K)
        different = torch.nonzero(g_idx != in_order).flatten()
        if different.numel():
            first, name, key = int(different[0]), layer.names.full(index), DENYING_CLAIMS[index]
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


def check_group_order(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report projections in another order than their siblings, and layers with groups as good as random."""
    layers = {layer.prefix: layer for layer in checkpoint.described()}
    # Groups of an index of zeros are in order: they do not follow `g_idx`.
    indexed = [
        prefix
        for prefix, layer in layers.items()
        if any(spec.name == "g_idx" and spec.index_of == "G" for spec in layer.specs)
    ]
    for together in projection_groups(indexed).values():
        first, *others = (layers[prefix] for prefix in together)
        for other in others:
            if _differs(first, other):
                name = other.names.full("g_idx")
                yield rule.finding(
                    name,
                    other.names.file("g_idx"),
                    f"{name}: not the act order of {first.names.full('g_idx')}, which has the same inputs",
                )
    for prefix in indexed:
        claims = layers[prefix].format.claims
        denied = claims is not None and claims.desc_act is False
        in_order = bool((layers[prefix].facts["g_idx"].diff() >= 0).all())
        if not (denied and in_order):  # a config without act order lost none
            yield from _lost_order(rule, checkpoint, layers[prefix])


def _differs(layer: LayerDescription, other: LayerDescription) -> bool:
    """Return whether two projections with equally many groups have different orders."""
    ours, theirs = layer.facts["g_idx"], other.facts["g_idx"]
    same = layer.K == other.K and layer.sizes["G"] == other.sizes["G"]
    return same and not torch.equal(ours.long(), theirs.long())


def _lost_order(rule: Rule, checkpoint: VerifiedCheckpoint, layer: LayerDescription) -> Iterator[Finding]:
    statistics = checkpoint.values.statistics.get(layer.prefix)
    if (
        statistics is None
        or statistics.reach is None
        or statistics.shuffled is None
        or statistics.bits not in CHECKED_BITS
    ):
        return
    if (
        statistics.groups >= MIN_ORDER_GROUPS
        and statistics.reach < MAX_REACH
        and statistics.reach - statistics.shuffled < MIN_ORDER_GAIN
    ):
        name = layer.names.full("g_idx")
        yield rule.finding(
            name,
            layer.names.file("g_idx"),
            f"{name}: {statistics.reach:.3f} of {statistics.groups} groups reach an end of the codes' range, "
            f"and {statistics.shuffled:.3f} of groups of random rows: the rows were quantized in other "
            "groups",
        )


def check_group_sizes(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each layer that another group size fits better."""
    layers = [
        (layer, statistics, statistics.reach, statistics.even)
        for layer in checkpoint.described()
        if (statistics := checkpoint.values.statistics.get(layer.prefix))
        and statistics.reach is not None
        and statistics.even is not None
    ]
    complete = [prefix for prefix, statistics, reach, even in layers if even == 1 > reach]
    all_of_few = len(complete) >= MIN_SIZE_LAYERS and not any(reach > even for _, _, reach, even in layers)
    for layer, statistics, reach, even in layers:
        significant = statistics.groups >= MIN_SIZE_GROUPS and even - reach > MIN_SIZE_GAIN
        if significant or (all_of_few and even == 1 > reach):
            codes, size = layer.specs[0].name, layer.K // statistics.inner
            name, file = layer.names.full(codes), layer.names.file(codes)
            message = (
                f"{name}: {reach:.3f} of {statistics.groups} groups reach an end of the codes' range; "
                f"with as many groups of {size} inputs, {even:.3f} do"
            )
            claims = layer.format.claims
            if checkpoint.claims is None or claims is None or claims.group_size is None:
                yield rule.finding(name, file, message, f"correct the group size in the config to {size}")
                continue
            remedy = f"set group_size to {size} in {claims.place(checkpoint.claims.file)}"
            shown = f"were quantized in groups of {size} inputs by their codes"
            contradiction = Contradiction(claims, claims.says("group_size"), shown, remedy)
            yield rule.contradiction(name, file, message, remedy, contradiction)
