"""Zero points lie where the mean of their codes does.

Weights are as often below zero as above, so that the mean code of a layer is about its mean zero point. It
is one code away where zero points are read in another convention than they were written in: `gptq` stores
them minus one, `gptq_v2` as they are. Zero points that are all one beside the middle say the same of a
symmetric layer.

How far a sound mean is from zero depends on how much is averaged. Weights of one input can have a mean of
their own, so that it is the inputs that count, and not the weights: of few, a mean says little. Zero points
that are all in the middle, of a symmetric layer, are no question: one that gives the largest weight of a
group the first code has a mean of 8 codes over its group size.
"""

from collections.abc import Iterator
from statistics import median

from qload.formats import GPTQConfig
from qload.layouts import Stored
from qload.listing.zero_points import convention
from qload.loader import LayerDescription
from qload.verify.contradictions import convention_contradiction
from qload.verify.kin import block
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.verify.values import Statistics

BITS = 4  # with more, the mean of sound weights is codes away from zero
GROUPS = 64  # that a mean is taken of, at least
NOISE = 0.92  # codes that are noise have any mean; sound ones have 0.85 at most
APART = 0.58  # codes; sound layers have up to 0.44, damaged ones from 0.71 on
TOGETHER = 0.5  # codes, of the median of all layers
SURE = 4.0  # standard errors beyond these; sound layers of 64 to 4,096 inputs had up to 3.3
OF_MEDIAN = 1.25  # the error of a median over that of a mean


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each layer whose codes are about another zero point."""
    told = [
        (layer, found)
        for layer in subject.described()
        if (found := subject.values.statistics.get(layer.prefix)) and _tells(layer, found)
        if not _is_known(layer)
    ]
    middle = _middle([found for _, found in told])
    denied = {layer.prefix: layer for layer in subject.described() if _is_denied(layer)}
    for layer, found in told:
        offset, doubt = found.offset or 0.0, SURE * found.error
        everywhere = offset * middle > 0
        beside = found.spread == 0 and _zero(found) in (-1, 1) and abs(offset) > TOGETHER + doubt
        if abs(offset) > APART + doubt or everywhere or beside:
            denied.pop(layer.prefix, None)
            field = next(spec.name for spec in layer.specs if "zero" in spec.name)
            name = layer.names.full(field)
            message = (
                f"{name}: codes are {offset:+.2f} from their zero points on average, in {found.groups} "
                f"groups; of zero points in the right convention the mean is within {APART + doubt:.2f}"
            )
            yield _finding(rule, subject, layer, name, message, offset)
    for layer in denied.values():
        text, name = str(layer.contradiction).split("\n  remedy")[0], layer.names.full("qzeros")
        yield _finding(rule, subject, layer, name, text.replace("\n  ", "\n"), None)


def _finding(
    rule: Rule, subject: Subject, layer: LayerDescription, name: str, message: str, offset: float | None
) -> Finding:
    """Finding with its remedy; `offset`: mean distance of codes from zero points, None if loads refuse it."""
    file, config, claims = layer.names.file(name.removeprefix(f"{layer.prefix}.")), layer.format.config, None
    if isinstance(config, GPTQConfig):
        claims = layer.format.claims
        side = 1 if isinstance(config.zeros, Stored) else -1  # of the mean in the other convention
        if offset is not None and round(offset) != side:
            claims = None
    contradiction = None
    if claims is not None and isinstance(config, GPTQConfig):
        contradiction = convention_contradiction(subject, claims, config.zeros)
    if contradiction is not None:
        remedy = "write the zero points of the layer again, in the convention of the other layers"
        return rule.contradiction(name, file, message, remedy, contradiction)
    steps = round(offset or 0)
    shift = f"{abs(steps)} {'higher' if steps > 0 else 'lower'}"
    again = "quantize the layer again" + (f", or write its zero points {shift}" if steps else "")
    return rule.finding(name, file, message, f"{again}: no setting of the config says so")


def _is_denied(layer: LayerDescription) -> bool:
    """Return whether loads refuse a layer because its codes contradict its zero points."""
    config = layer.format.config
    lost = isinstance(config, GPTQConfig) and config.evidence == "lost"
    return layer.contradiction is not None and not lost and not _is_known(layer)


def _is_known(layer: LayerDescription) -> bool:
    """Return whether the config claims symmetric zero points, a case of the rule `symmetry`."""
    claims = layer.format.claims
    return claims is not None and bool(claims.sym) and isinstance(layer.format.config, GPTQConfig)


def _middle(told: list[Statistics]) -> float:
    """The median of all layers, where it is too far from zero to be one by chance; else 0."""
    if len(told) < 2:
        return 0.0
    middle = median([found.offset or 0.0 for found in told])
    error = OF_MEDIAN * median([found.error for found in told]) / len(told) ** 0.5
    return middle if abs(middle) > TOGETHER + SURE * error else 0.0


def _tells(layer: LayerDescription, found: Statistics) -> bool:
    """Whether a layer of a model stores zero points whose mean says something."""
    if found.offset is None or found.bits > BITS or found.groups < GROUPS or found.evenness > NOISE:
        return False
    if block(layer.prefix) is None or (found.spread == 0 and _zero(found) == 0):
        return False
    return convention(layer) is not None or any("zero" in spec.name for spec in layer.specs)


def _zero(found: Statistics) -> int:
    return 0 if found.zero is None else round(found.zero) - 2 ** (found.bits - 1)


RULE = Rule("zero-point-mean", "meaning", check)
