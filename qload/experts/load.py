"""From a prefix to the experts of a layer: every name and cut checked, then one expert at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qload.experts.biases import bias_name, read_biases
from qload.experts.described import Described, Shares, check_cuts, columns, described, parts_of, rows
from qload.experts.facts import ExpertFacts, facts_of
from qload.experts.local import ExpertSplit, LocalExperts, grid, local_experts
from qload.experts.names import ExpertNames, Holder, Naming, names_of
from qload.experts.source import ExpertSource
from qload.experts.stacking import Stacking
from qload.experts.weight import ExpertsWeight
from qload.loader import FormatLoader, Split, WeightsLoader
from qload.loader.finite_scales import check_scales, refuses_nonfinite
from qload.spec import Weight
from qload.storage import WeightStorage

ELSEWHERE = "of an expert that another rank has"


class Owner(Holder, Protocol):
    """What `Weights` is here."""

    storage: WeightStorage
    device: torch.device

    @property
    def loader(self) -> WeightsLoader:
        """What serves the typed loads."""

    def exempt_by(self, reason_of: Callable[[str], str | None]) -> None:
        """Tensors for whose names there is a reason may stay unused."""


@dataclass(frozen=True)
class Plan:
    """A load of which names, facts and cuts are checked, on every rank alike, and no weight was read."""

    names: ExpertNames
    local: LocalExperts
    source: ExpertSource
    found: Described
    shares: Shares
    cut: bool

    @property
    def here(self) -> list[Naming]:
        """The prefixes of gate, up and down of every expert that is here."""
        return [self.names.of(expert) for expert in range(self.local.start, self.local.stop)]


def load_experts(
    weights: Owner,
    prefix: str,
    split: ExpertSplit | None,
    expert_ranks: int | None,
    facts: ExpertFacts | None,
) -> ExpertsWeight:
    """The experts under a prefix that are on this rank, or its share of each; see `Weights.get_experts`."""
    plan = plan_experts(weights, prefix, split, expert_ranks, examine=refuses_nonfinite(weights))
    known = facts or facts_of(weights.architecture)
    gate_ups, downs = Stacking(prefix, len(plan.local)), Stacking(prefix, len(plan.local))
    plan.source.begin(plan.found.facts)
    for gate, up, down in plan.here:
        gate_ups.put(_load(weights.loader, plan.source, [gate, up], columns(plan.cut), gate_ups.places()))
        downs.put(_load(weights.loader, plan.source, [down], rows(plan.cut), downs.places()))
    biases = _biases(plan, weights.device)
    made = ExpertsWeight(gate_ups.stack(), downs.stack(), known, plan.local, *biases)
    plan.source.end()
    elsewhere = dict.fromkeys((plan.names.lead + name for name in plan.found.elsewhere), ELSEWHERE)
    if elsewhere:
        weights.exempt_by(elsewhere.get)
    return made


def _load(
    loader: WeightsLoader,
    source: ExpertSource,
    prefixes: Sequence[str],
    split: Split | None,
    places: Mapping[str, Tensor],
) -> Weight:
    """One layer of an expert, read straight to its places where the loader can."""
    if isinstance(loader, FormatLoader):
        return loader.load(source, parts_of(*prefixes), split, out=places)
    return loader.load(source, parts_of(*prefixes), split)


def plan_experts(
    weights: Owner,
    prefix: str,
    split: ExpertSplit | None,
    expert_ranks: int | None = None,
    *,
    examine: bool = False,
) -> Plan:
    """All that is checked before a weight is read: names, headers, facts, and every cut of every rank.

    `examine`: the scales of all experts too, where other ranks have some: all ranks refuse alike.
    """
    groups = grid(split, weights.process_group, expert_ranks)
    names = names_of(weights, prefix)
    local = local_experts(prefix, names.count, groups.experts)
    source, cut = ExpertSource(weights, groups.tensor), split in ("tensor", "both")
    found = described(source, weights.loader, names, local, weights.device)
    plan = Plan(names, local, source, found, check_cuts(source, found, cut), cut)
    if examine and len(local) < names.count:
        for layer in found.everyone:
            check_scales(source, [layer], {}, whole=False)
    return plan


def _biases(plan: Plan, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Of gate and up this rank's outputs; of down all, on the first of the ranks whose outputs are summed."""
    source, (of_gates, _, of_downs) = plan.source, plan.found.biased
    gates = [(gate, up) for gate, up, _ in plan.here if of_gates]
    downs = [(down,) for _, _, down in plan.here if of_downs]
    first = read_biases(source, gates, plan.shares[0], device) if gates else None
    if not downs:
        return first, None
    if source.process_group.rank():
        source.take(bias_name(down) for (down,) in downs)  # which another rank adds
        return first, None
    return first, read_biases(source, downs, plan.shares[1], device)
