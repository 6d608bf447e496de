"""Of two group sizes that make as many groups, the config says the one that the codes were quantized in.

Where K is no multiple of the group size, a smaller one makes as many groups, of equal size. In the groups
that a quantizer saw more groups reach an end of the codes' range.
"""

from collections.abc import Iterator

from qload.verify.report import Contradiction, Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

GROUPS = 64  # of which a share is taken, at least, where it is not of all
GAIN = 0.03  # by which the other size has to be better
LAYERS = 3  # where all of few groups tell


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each layer that another group size fits better."""
    told = [
        (layer, found, found.reach, found.even)
        for layer in subject.described()
        if (found := subject.values.statistics.get(layer.prefix))
        and found.reach is not None
        and found.even is not None
    ]
    whole = [prefix for prefix, found, reach, even in told if even == 1 > reach]
    all_of_few = len(whole) >= LAYERS and not any(reach > even for _, _, reach, even in told)
    for layer, found, reach, even in told:
        many = found.groups >= GROUPS and even - reach > GAIN
        if many or (all_of_few and even == 1 > reach):
            codes, size = layer.specs[0].name, layer.K // found.inner
            name, file = layer.names.full(codes), layer.names.file(codes)
            message = (
                f"{name}: {reach:.3f} of {found.groups} groups reach an end of the codes' range; of groups "
                f"of {size} inputs, of which there are as many, {even:.3f} do"
            )
            claims = layer.format.claims
            if subject.claims is None or claims is None or claims.group_size is None:
                yield rule.finding(name, file, message, f"correct the group size in the config to {size}")
                continue
            remedy = f"set group_size to {size} in {claims.place(subject.claims.file)}"
            shown = f"were quantized in groups of {size} inputs by their codes"
            contradiction = Contradiction(claims, claims.says("group_size"), shown, remedy)
            yield rule.contradiction(name, file, message, remedy, contradiction)


RULE = Rule("group-size", "meaning", check, each=True)
