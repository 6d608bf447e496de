"""From a prefix to the experts of a layer: every name and cut checked, then one expert at a time."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from qload.experts.biases import bias_name, read_biases
from qload.experts.described import Shares, check_cuts, columns, described, parts_of, rows
from qload.experts.facts import ExpertFacts, facts_of
from qload.experts.local import ExpertSplit, grid, local_experts
from qload.experts.names import Holder, Naming, names_of
from qload.experts.source import ExpertSource
from qload.experts.stacking import Stacking
from qload.experts.weight import ExpertsWeight
from qload.loader import WeightsLoader

ELSEWHERE = "of an expert that another rank has"


class Owner(Holder, Protocol):
    """What `Weights` is here."""

    device: torch.device

    @property
    def loader(self) -> WeightsLoader:
        """What serves the typed loads."""

    def exempt_by(self, reason_of: Callable[[str], str | None]) -> None:
        """Tensors for whose names there is a reason may stay unused."""


def load_experts(
    weights: Owner,
    prefix: str,
    split: ExpertSplit | None,
    expert_ranks: int | None,
    facts: ExpertFacts | None,
) -> ExpertsWeight:
    """The experts under a prefix that are on this rank, or its share of each; see `Weights.get_experts`."""
    known, groups = facts or facts_of(weights.architecture), grid(split, weights.process_group, expert_ranks)
    names = names_of(weights, prefix)
    local = local_experts(prefix, names.count, groups.experts)
    source, cut = ExpertSource(weights, groups.tensor), split in ("tensor", "both")
    found = described(source, weights.loader, names, local, weights.device)
    shares = check_cuts(source, found, cut)
    here = [names.of(expert) for expert in range(local.start, local.stop)]
    source.begin(found.facts)
    gate_ups, downs = Stacking(prefix, len(local)), Stacking(prefix, len(local))
    for gate, up, down in here:
        gate_ups.put(weights.loader.load(source, parts_of(gate, up), columns(cut)))
        downs.put(weights.loader.load(source, parts_of(down), rows(cut)))
    made = ExpertsWeight(
        gate_ups.stack(),
        downs.stack(),
        known,
        local,
        *_biases(source, found.biased, here, shares, weights.device),
    )
    source.end()
    elsewhere = dict.fromkeys((names.lead + name for name in found.elsewhere), ELSEWHERE)
    if elsewhere:
        weights.exempt_by(elsewhere.get)
    return made


def _biases(
    source: ExpertSource,
    biased: Sequence[bool],
    here: Sequence[Naming],
    shares: Shares,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """Of gate and up this rank's outputs; of down all, on the first of the ranks whose outputs are summed."""
    gates = [(gate, up) for gate, up, _ in here if biased[0]]
    downs = [(down,) for _, _, down in here if biased[2]]
    first = read_biases(source, gates, shares[0], device) if gates else None
    if not downs:
        return first, None
    if source.process_group.rank():
        source.take(bias_name(down) for (down,) in downs)  # which another rank adds
        return first, None
    return first, read_biases(source, downs, shares[1], device)
