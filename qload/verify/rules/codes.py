"""Rules of codes: zero points, their symmetry and convention, the order of codes, act order, and groups.

`gptq` stores zero points minus one, `gptq_v2` stores them unchanged. Read in the wrong convention, every
weight is off by one scale. Kernels for symmetric weights never read `qzeros`, so that only other engines show
the error.

Weights are as often below zero as above, so that the mean code of a layer is close to its mean zero point,
and one code away in the wrong convention. The precision of a mean depends on the number of inputs and
outputs, because each may have a mean of its own. Zero points that all have the middle value of a symmetric
layer are exempt: a quantizer that gives the largest weight of a group the first code has a mean of 8 codes
over its group size. An offset, such as a bias of MLX, is a zero point times a scale.

A stored zero point of 0 minus one is -1, and programs wrap it in three ways: subtraction from whole words
borrows from the next field; each field wraps by itself; or an OR of -1 destroys the zero points above in the
word.

In an asymmetric layer a group's zero point follows its weights. Codes in another order within a word, or zero
points in another order, are paired with zero points of other columns, and the correlation is lost.

Engines that trust `desc_act: false` drop `g_idx`, and read every row with another row's scale. The opposite,
`desc_act: true` with groups in order (static groups), is lawful and only noted. Act order permutes the rows
of groups and never changes their number.

Projections of one input have one act order, because a quantizer sorts their rows by the input alone. A
group's scale comes from its largest weight, so that most groups reach an end of the codes' range; in the
groups of a lost or foreign index no more groups do than in random groups. If K is not a multiple of the group
size, a smaller size makes as many groups of equal size; in the quantizer's own groups more reach an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from qload.architecture.names import block_of, projection_groups
from qload.checkpoint.layer_info import zero_point_convention, zero_point_runs, zero_point_words
from qload.formats import GPTQConfig
from qload.layouts import Stored, gptq
from qload.lazy_torch import torch
from qload.loader import LayerDescription
from qload.spec import Grouped
from qload.spec.zero_point_evidence import FIELDS, WHOLE
from qload.storage import WeightStorage
from qload.verify.blocks import find_wrong
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Contradiction, Finding
from qload.verify.rules.rule import Rule, convention_contradiction
from qload.verify.values import Statistics

MAX_EVENNESS = 0.92  # of codes; noise has more, and says nothing; sound layers have 0.85 at most

# zero-point-mean
MAX_BITS = 4  # with more, the mean of sound weights is codes away from zero
MIN_MEAN_GROUPS = 64  # groups of a layer with a usable mean
MAX_OFFSET = 0.58  # codes; sound layers have up to 0.44, damaged ones from 0.71 on
MAX_COMMON_OFFSET = 0.5  # codes, for the median of all layers
MAX_STANDARD_ERRORS = 4.0  # beyond these offsets; sound layers of 64 to 4,096 inputs had up to 3.3
OFFSETS = ("biases", "weight_shift")  # fields whose quotient by the scale is a zero point
MEDIAN_ERROR = 1.25  # error of a median over the error of a mean

# code-order
MIN_CORRELATED_GROUPS = 128  # groups of a layer with a usable correlation
MIN_SPREAD = 0.5  # codes; zero points with less do not vary enough
MIN_CORRELATION = 0.45  # sound layers have 0.65 and more; with every second code in its place 0.3 and less


def check_symmetry(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each symmetric layer with a zero point other than 2**(bits - 1): the first, and the count."""
    claims = checkpoint.claims
    if claims is None:
        return
    for layer in checkpoint.described():
        known, config, layer_claims = zero_point_convention(layer), layer.format.config, layer.format.claims
        if known is None or not isinstance(config, GPTQConfig):
            continue
        if layer_claims is None or not layer_claims.sym:
            continue
        (zeros, packing), middle = known, 2 ** (config.bits - 1)
        runs = zero_point_runs(checkpoint.weights.storage, layer)
        differing = ((start, zeros.read(run, packing)) for start, run, same in runs if not same)
        wrong = find_wrong((start, values, values != middle) for start, values in differing)
        if wrong is not None:
            name = f"{layer.prefix}.qzeros"
            count, (g, n), value = wrong
            total = config.groups(layer.K) * layer.N
            message = (
                f"{name}: zero point {value:g} at group {g}, column {n}, a symmetric layer of "
                f"{config.bits} bits has {middle}; {count} of {total} differ "
                f"(read as {zeros.name}, as {claims.file} says checkpoint_format {claims.format}"
                + (f"; there {layer_claims.says('sym')})" if layer_claims.source else ")")
            )
            other = convention_contradiction(checkpoint, layer_claims, zeros) if layer.contradiction else None
            remedy = f"set sym to false in {layer_claims.place(claims.file)}"
            if other is None:
                shown = f"have zero points other than {middle}"
                other = Contradiction(layer_claims, layer_claims.says("sym"), shown, remedy)
                remedy += ", if the layer was quantized with zero points; else fetch the checkpoint again"
            else:
                remedy = "write the zero points of the layer again, in the convention of the other layers"
            yield rule.contradiction(name, layer.names.file("qzeros"), message, remedy, other)


def check_mean(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each layer with a mean code too far from its zero points."""
    measured = [
        (layer, statistics)
        for layer in checkpoint.described()
        if (statistics := checkpoint.values.statistics.get(layer.prefix))
        and _has_usable_mean(layer, statistics)
        if not _is_symmetric(layer)
    ]
    middle = _common_offset([statistics for _, statistics in measured])
    denied = {layer.prefix: layer for layer in checkpoint.described() if _is_denied(layer)}
    for layer, statistics in measured:
        offset, doubt = statistics.offset or 0.0, MAX_STANDARD_ERRORS * statistics.error
        everywhere = offset * middle > 0
        shifted = (
            statistics.spread == 0
            and _distance_to_middle(statistics) in (-1, 1)
            and abs(offset) > MAX_COMMON_OFFSET + doubt
        )
        if abs(offset) > MAX_OFFSET + doubt or everywhere or shifted:
            denied.pop(layer.prefix, None)
            name = layer.names.full(_zero_field(layer) or "")
            message = (
                f"{name}: codes are {offset:+.2f} from their zero points on average, in {statistics.groups} "
                f"groups; in the right convention the mean is within {MAX_OFFSET + doubt:.2f}"
            )
            yield _mean_finding(rule, checkpoint, layer, name, message, offset)
    for layer in denied.values():
        text, name = str(layer.contradiction).split("\n  remedy")[0], layer.names.full("qzeros")
        yield _mean_finding(rule, checkpoint, layer, name, text.replace("\n  ", "\n"), None)


def _mean_finding(
    rule: Rule,
    checkpoint: VerifiedCheckpoint,
    layer: LayerDescription,
    name: str,
    message: str,
    offset: float | None,
) -> Finding:
    """Make a finding; `offset`: mean code minus zero point, None if loads refuse the layer."""
    file, config, claims = checkpoint.weights.info(name).file, layer.format.config, None
    if isinstance(config, GPTQConfig):
        claims = layer.format.claims
        side = 1 if isinstance(config.zeros, Stored) else -1  # of the mean in the other convention
        if offset is not None and round(offset) != side:
            claims = None
    contradiction = None
    if claims is not None and isinstance(config, GPTQConfig):
        contradiction = convention_contradiction(checkpoint, claims, config.zeros)
    if contradiction is not None:
        remedy = "write the zero points of the layer again, in the convention of the other layers"
        return rule.contradiction(name, file, message, remedy, contradiction)
    steps = round(offset or 0)
    shift = f"{abs(steps)} {'higher' if steps > 0 else 'lower'}"
    again = "quantize the layer again"
    if steps and _zero_field(layer) in OFFSETS:
        again += f", or write {name} for zero points {shift}"
    elif steps:
        again += f", or write its zero points {shift}"
    return rule.finding(name, file, message, f"{again}: no setting of the config says so")


def _is_denied(layer: LayerDescription) -> bool:
    """Return whether loads refuse a layer because its codes contradict its zero points."""
    config = layer.format.config
    lost = isinstance(config, GPTQConfig) and config.evidence == "lost"
    return layer.contradiction is not None and not lost and not _is_symmetric(layer)


def _is_symmetric(layer: LayerDescription) -> bool:
    """Return whether the config claims symmetric zero points, a case of the rule `symmetry`."""
    claims = layer.format.claims
    return claims is not None and bool(claims.sym) and isinstance(layer.format.config, GPTQConfig)


def _common_offset(measured: list[Statistics]) -> float:
    """Return the median offset of all layers if it is too far from zero for chance; otherwise 0."""
    if len(measured) < 2:
        return 0.0
    middle = median([statistics.offset or 0.0 for statistics in measured])
    error = MEDIAN_ERROR * median([statistics.error for statistics in measured]) / len(measured) ** 0.5
    return middle if abs(middle) > MAX_COMMON_OFFSET + MAX_STANDARD_ERRORS * error else 0.0


def _has_usable_mean(layer: LayerDescription, statistics: Statistics) -> bool:
    """Return whether a layer of a model stores zero points with a significant mean."""
    if statistics.offset is None or statistics.bits > MAX_BITS or statistics.groups < MIN_MEAN_GROUPS:
        return False
    if statistics.evenness > MAX_EVENNESS or block_of(layer.prefix) is None:
        return False
    if statistics.spread == 0 and _distance_to_middle(statistics) == 0:
        return False
    return _zero_field(layer) is not None


def _zero_field(layer: LayerDescription) -> str | None:
    """Return the field with the zero points of a layer, or with its offsets in units of weights."""
    return next((spec.name for spec in layer.specs if "zero" in spec.name or spec.name in OFFSETS), None)


def _distance_to_middle(statistics: Statistics) -> int:
    return 0 if statistics.zero is None else round(statistics.zero) - 2 ** (statistics.bits - 1)


def check_readings(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report layers with an ambiguous reading, and layers with lost zero points."""
    for layer in checkpoint.described():
        config = layer.format.config
        if not isinstance(config, GPTQConfig) or config.evidence not in ("none", "lost"):
            continue
        if config.evidence == "none" and layer.format.claims is not None and layer.format.claims.sym:
            continue  # the rule `symmetry` reports it
        if config.evidence == "lost":
            name, file = layer.names.full("qzeros"), layer.names.file("qzeros")
            text = str(layer.contradiction).replace("\n  ", "\n").split("\nremedy")[0]
            remedy = "quantize again: the file does not contain the lost zero points"
            yield Finding(rule.id, "error", name, file, text, remedy)
            continue
        count = _count_ambiguous(checkpoint.weights.storage, layer)
        total = config.groups(layer.K) * layer.N
        yield rule.field_finding(
            layer,
            "qzeros",
            f"{count} of {total} zero points have two readings, and neither codes nor config decide: "
            f"{WHOLE.name} from whole words (used here), and {FIELDS.name}",
            "compare with the float original by --against, or store zero points unchanged (gptq_v2)",
        )


def _count_ambiguous(storage: WeightStorage, layer: LayerDescription) -> int:
    """Count the zero points that differ between both readings."""
    config = layer.format.config
    assert isinstance(config, GPTQConfig)
    packing = gptq.columns(config.bits)
    return sum(
        int((WHOLE.read(run, packing) != FIELDS.read(run, packing)).sum())
        for _, run in zero_point_words(storage, layer)
    )


def check_code_order(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each layer with zero points that do not follow its codes."""
    for layer in checkpoint.described():
        statistics = checkpoint.values.statistics.get(layer.prefix)
        if statistics is None or statistics.correlation is None or block_of(layer.prefix) is None:
            continue
        varied = (
            statistics.groups >= MIN_CORRELATED_GROUPS
            and statistics.spread >= MIN_SPREAD
            and statistics.evenness < MAX_EVENNESS
        )
        if varied and statistics.correlation < MIN_CORRELATION:
            yield rule.field_finding(
                layer,
                layer.specs[0].name,
                f"the mean codes of {statistics.groups} groups and their zero points have a "
                f"correlation of {statistics.correlation:.2f}, in sound layers at least {MIN_CORRELATION}: "
                "the codes of a word, or its zero points, are in another order",
            )


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
        expected = torch.bincount(config.in_order(K))
        counts = torch.bincount(layer.facts["g_idx"].long(), minlength=G)
        wrong = torch.nonzero(counts != expected).flatten()
        if wrong.numel():
            first = int(wrong[0])
            yield rule.field_finding(
                layer,
                "g_idx",
                f"group {first} has {int(counts[first])} rows, a group size of {config.group_size} "
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
                yield rule.field_finding(
                    other,
                    "g_idx",
                    f"not the act order of {first.names.full('g_idx')}, which has the same inputs",
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
        yield rule.field_finding(
            layer,
            "g_idx",
            f"{statistics.reach:.3f} of {statistics.groups} groups reach an end of the codes' range, "
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
