"""Groups of higher codes have higher zero points.

In an asymmetric layer a group's zero point follows its weights: where most are above zero it is low, and so
are not the codes. Codes in another order of the eight in a word, or zero points in one, are beside zero
points of other columns, and the two have nothing to do with each other.
"""

from collections.abc import Iterator

from qload.verify.kin import block
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

GROUPS = 128  # that a correlation is taken of, at least
SPREAD = 0.5  # codes, of zero points that differ enough to follow anything
NOISE = 0.92  # codes that are noise follow nothing; sound ones have 0.85 at most
LEAST = 0.45  # sound layers have 0.65 and more, with every second code in its place 0.3 and less


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each layer whose zero points do not follow its codes."""
    for layer in subject.described():
        found = subject.values.statistics.get(layer.prefix)
        if found is None or found.correlation is None or block(layer.prefix) is None:
            continue
        varied = found.groups >= GROUPS and found.spread >= SPREAD and found.evenness < NOISE
        if varied and found.correlation < LEAST:
            codes = layer.specs[0].name
            name, file = layer.names.full(codes), layer.names.file(codes)
            yield rule.finding(
                name,
                file,
                f"{name}: the mean codes of {found.groups} groups and their zero points have a correlation "
                f"of {found.correlation:.2f}, in sound layers at least {LEAST}: the codes of a word, or its "
                "zero points, are in another order",
            )


RULE = Rule("code-order", "meaning", check, each=True)
