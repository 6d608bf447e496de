"""A tensor that all the other layers of a block have is missing from one.

The rule compares `model.layers.0`, `model.layers.1`, ... and the experts of a layer by the names under
them; the stages of a vision tower lawfully differ, and are left out. Layers of a hybrid
model lawfully differ, but then neither holds a strict part of the other, or several are alike; a layer
that is alone in having strictly less than others has lost something. It cannot see what every layer
lost, nor what two layers lost alike.

Of a type of model without a table layers may differ by design, as the first of ModernBERT has no norm: then
what is missing is a note, but for a part of a quantized layer whose other parts are there, and for experts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from qload.architecture.adapters import is_adapter
from qload.architecture.config import PREDICTING
from qload.loader import LayerDescription
from qload.verify import kin
from qload.verify.kin import BLOCK
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class Loss:
    """A tensor that one layer lacks, and the same tensor of a sibling that has it."""

    name: str
    kept: str
    block: str
    having: int
    siblings: int

    @property
    def text(self) -> str:
        """What is missing, and who has it."""
        having = f"{self.having} of its {self.siblings} siblings have it"
        return f"{self.name}: missing, and {having}, such as {self.kept}"


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor that one layer lacks and its siblings have."""
    for loss in losses(subject):
        if _certain(subject, loss) and not _is_by_design(subject, loss):
            yield rule.finding(loss.name, None, loss.text, "fetch or write the checkpoint again")


def doubtful(subject: Subject) -> Iterator[Loss]:
    """What layers lack that may have been made so."""
    found = (loss for loss in losses(subject) if not _certain(subject, loss))
    return (loss for loss in found if not _is_by_design(subject, loss))


def losses(subject: Subject) -> Iterator[Loss]:
    """Each tensor that one layer lacks and its siblings have; layers that predict further words aside."""
    for block, layers in blocks_of(_alike(subject)).items():
        alike = Counter(layers.values())
        if len(alike) == 1:
            continue
        supersets = _Supersets(layers)
        for index, held in layers.items():
            fuller = None if alike[held] > 1 else supersets.fullest(held)
            if fuller is None:
                continue
            having = sum(alike[other] for other in supersets.holding(layers[fuller]))
            for lost in sorted(layers[fuller] - held):
                kept, name = f"{block}.{fuller}.{lost}", f"{block}.{index}.{lost}"
                if not any(map(subject.account.hides, (kept, name))):  # unread dialects have other tensors
                    yield Loss(name, kept, block, having, len(layers) - 1)


def _is_by_design(subject: Subject, loss: Loss) -> bool:
    """Return whether a layer lacks a tensor by design: plain, or under another entry of the config."""
    theirs = subject.all_layers.get(subject.prefixes[loss.kept])
    if not isinstance(theirs, LayerDescription) or theirs.format.weight_type.plain:
        return False
    names = {theirs.names.full(spec.name) for spec in theirs.specs}
    layer = subject.all_layers.get(loss.name.removesuffix(loss.kept[len(theirs.prefix) :]))
    if loss.kept not in names or not isinstance(layer, LayerDescription):
        return False
    ours, other = ((each.format.claims, each.format.activations) for each in (layer, theirs))
    return layer.format.weight_type.plain or ours != other


def _alike(subject: Subject) -> list[str]:
    """Names without those of MTP layers, which have more tensors, and of adapters."""
    architecture, names = subject.architecture, [name for name in subject.names if not is_adapter(name)]
    predicting = {kin.block(name) for name in names if not PREDICTING.isdisjoint(name.split("."))}
    announced = architecture is not None and architecture.sizes.get("predict")
    return [
        name
        for name in names
        if not (predicting and kin.block(name) in predicting)
        and not (announced and architecture is not None and architecture.predictor(name) is not None)
    ]


def _certain(subject: Subject, loss: Loss) -> bool:
    """Whether nobody makes a model like that."""
    if subject.ordinary or loss.block.endswith("experts"):
        return True
    layer, (prefix, _, part) = subject.all_layers.get(subject.prefixes[loss.kept]), loss.name.rpartition(".")
    quantized = isinstance(layer, LayerDescription) and not layer.format.weight_type.plain
    return quantized and part != "bias" and prefix in subject.suffixes


def blocks_of(names: list[str]) -> Mapping[str, Mapping[str, Names]]:
    """`model.layers` -> its indices -> the names under each."""
    blocks: dict[str, dict[str, set[str]]] = {}
    is_block = cache(lambda lead: BLOCK.fullmatch(lead) is not None)
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts[:-1]):
            if part.isdecimal() and is_block(".".join(parts[:at])):
                members = blocks.setdefault(".".join(parts[:at]), {}).setdefault(part, set())
                members.add(".".join(parts[at + 1 :]))
    return {
        block: {index: frozenset(members) for index, members in layers.items()}
        for block, layers in blocks.items()
    }


class _Supersets:
    """Which layers have all of some names: only those that have the rarest of them are asked."""

    def __init__(self, layers: Mapping[str, Names]) -> None:
        self._first: dict[Names, str] = {}  # of layers that are alike, the first; in the order of layers
        for index, names in layers.items():
            self._first.setdefault(names, index)
        self._having: dict[str, list[Names]] = {}
        for names in self._first:
            for name in names:
                self._having.setdefault(name, []).append(names)

    def holding(self, names: Names) -> Iterator[Names]:
        """Each set of names that holds all of these, once."""
        rarest = min((self._having[name] for name in names), key=len)
        return (other for other in rarest if names <= other)

    def fullest(self, names: Names) -> str | None:
        """The first layer of those that have the most beyond all of these names."""
        fuller = [other for other in self.holding(names) if len(other) > len(names)]
        return self._first[max(fuller, key=len)] if fuller else None


RULE = Rule("missing-sibling", "headers", check)
