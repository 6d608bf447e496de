"""Zero points of 0 stored minus one have a single reading.

A zero point of 0 minus one is -1, and programs wrap it in three ways. Subtraction from whole words borrows
from the next field; each field wraps by itself; or an OR of -1 destroys the zero points above in the word.
Codes are evidence, since they are near their zero points in the right reading; so are the name of the
quantizer and the reference of `--against`. Without evidence programs read the layer differently.
"""

from collections.abc import Iterator

from qload.formats import GPTQConfig
from qload.formats.gptq import FIELDS, WHOLE
from qload.layouts import gptq
from qload.listing.zero_points import words
from qload.loader import LayerDescription
from qload.storage import WeightStorage
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

ID = "zero-point-reading"


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Report layers with an ambiguous reading, and layers with lost zero points."""
    assert subject.weights is not None
    for layer in subject.described():
        config = layer.format.config
        if not isinstance(config, GPTQConfig) or config.evidence not in ("none", "lost"):
            continue
        if config.evidence == "none" and layer.format.claims is not None and layer.format.claims.sym:
            continue  # the rule `symmetry` reports it
        name, file = layer.names.full("qzeros"), layer.names.file("qzeros")
        if config.evidence == "lost":
            text = str(layer.contradiction).replace("\n  ", "\n").split("\nremedy")[0]
            yield Finding(
                ID,
                "error",
                name,
                file,
                text,
                "quantize again: the file does not contain the lost zero points",
            )
            continue
        count, total = _count_differing(subject.weights.storage, layer), config.groups(layer.K) * layer.N
        yield rule.finding(
            name,
            file,
            f"{name}: {count} of {total} zero points have two readings, and neither codes nor config show "
            "which "
            f"is right: {WHOLE.name} from whole words (used here), and {FIELDS.name}",
            "compare with the float original by --against, or store zero points unchanged (gptq_v2)",
        )


def _count_differing(storage: WeightStorage, layer: LayerDescription) -> int:
    """Count the zero points that differ between both readings."""
    config = layer.format.config
    assert isinstance(config, GPTQConfig)
    packing = gptq.columns(config.bits)
    return sum(
        int((WHOLE.read(run, packing) != FIELDS.read(run, packing)).sum()) for _, run in words(storage, layer)
    )


RULE = Rule(ID, "meaning", check, "warning", each=True)
