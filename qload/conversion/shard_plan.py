"""What a checkpoint in shares will consist of, known before a byte is written, or what stands in the way."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qload.conversion.items import Item, copied
from qload.conversion.planned import STACKED, Told, nonfinite_layers
from qload.conversion.rank_share import RankShare
from qload.conversion.source import as_stored
from qload.loader import LayerDescription
from qload.loader.finite_scales import Nonfinite
from qload.plan.layer_shares import Answers
from qload.plan.sharing import Sharing, described_model, sharings
from qload.spec import named
from qload.verify.crew import Crew
from qload.verify.subject import Subject

WHOLE = "tensors of no layer but biases are whole in each folder"
BIASES = "a bias of a layer that is cut along its inputs is in the first rank's folder alone, which adds it"
CONFIGS_OF_ALL = "config.json describes the whole model, as each rank's program reads it"


@dataclass(frozen=True)
class PlannedShares:
    """Shares before they are written.

    `how`: of each layer, by prefix, as all here; `shares`: for each rank those that are cut; `refused`: why.
    """

    how: Mapping[str, Sharing]
    shares: Sequence[Mapping[str, RankShare]]
    items: Sequence[Sequence[Item]]
    refused: Mapping[str, str]
    notes: Sequence[str]


def planned_shares(
    subject: Subject, ranks: int, runs: int | None, tell: Told, nonfinite: Nonfinite = "error"
) -> PlannedShares:
    """Every layer asked for every rank, in the words of `plan`; ArgumentError for `runs` without experts."""
    weights = subject.weights
    assert weights is not None
    model, why = described_model(subject.model_config)
    how = sharings(subject.groups, model, runs)
    refused = _refused(subject, how, ranks)
    refused |= nonfinite_layers(subject) if nonfinite == "error" else {}
    if refused:
        lawful = Answers(weights).lawful(subject.layers, how, runs)
        return PlannedShares(how, (), (), refused, () if lawful is None else [lawful.text()])
    asked = [(rank, prefix) for rank in range(ranks) for prefix in how if how[prefix].cut != "whole"]

    def share_of(at: int) -> tuple[RankShare | None, str | None]:
        rank, prefix = asked[at]
        layer = subject.layers[prefix]
        assert isinstance(layer, LayerDescription)
        share = RankShare.of(weights, layer, how[prefix], rank, ranks)
        return share, share.why_not() if share else None

    found = Crew.of(None).share_out(share_of, [1] * len(asked), tell)
    refused = {prefix: why for (_, prefix), (_, why) in zip(asked, found, strict=True) if why}
    if refused:
        return PlannedShares(how, (), (), refused, ())
    shares: list[dict[str, RankShare | None]] = [{} for _ in range(ranks)]
    for (rank, prefix), (share, _) in zip(asked, found, strict=True):
        shares[rank][prefix] = share
    items = [list(_items(subject, mine)) for mine in shares]
    held = [{prefix: share for prefix, share in mine.items() if share} for mine in shares]
    return PlannedShares(how, held, items, {}, list(_notes(subject, how, why)))


def _refused(subject: Subject, how: Mapping[str, Sharing], ranks: int) -> dict[str, str]:
    """What ranks cannot share, in the words of a load; and what is no tensor by itself."""
    assert subject.weights is not None
    answers, found = Answers(subject.weights), {}
    raw = as_stored(subject).keys()
    for prefix, sharing in how.items():
        layer = subject.layers.get(prefix)
        share = answers.of(prefix, layer, sharing, [ranks]).shares[ranks]
        if not share.fits:
            found[prefix] = share.reason
        elif isinstance(layer, LayerDescription):
            stacked = [name for spec in layer.specs if (name := layer.names.full(spec.name)) not in raw]
            if stacked:
                found[prefix] = f"{stacked[0]} {STACKED}"
    return found


def _items(subject: Subject, mine: Mapping[str, RankShare | None]) -> Iterator[Item]:
    """All that stands in the files of one rank, in the order of the source."""
    raw, holders = as_stored(subject), {}
    for prefix in mine:
        layer = subject.layers[prefix]
        assert isinstance(layer, LayerDescription)
        names = [layer.names.full(spec.name) for spec in layer.specs]
        holders.update(dict.fromkeys([*names, named(prefix, "bias")], prefix))
    begun: set[str] = set()
    for name in list(raw.keys()):
        holder = holders.get(name)
        if holder is None:
            yield copied(raw, name)
        elif holder not in begun:
            begun.add(holder)
            share = mine[holder]
            if share is not None:
                yield share.item()


def _notes(subject: Subject, how: Mapping[str, Sharing], why: str) -> Iterator[str]:
    yield CONFIGS_OF_ALL
    yield WHOLE
    if any(each.cut == "K" and named(prefix, "bias") in subject.names for prefix, each in how.items()):
        yield BIASES
    if why:
        yield why
