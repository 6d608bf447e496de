"""Distribution of experts over ranks: the experts of a rank, and the groups of a world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qload.errors import ArgumentError, DivideError, check_fields, worlds
from qload.lazy_torch import Tensor, torch
from qload.loader.sharding import WORLDS
from qload.parallel import ALONE, ProcessGroup, Rank

ExpertSplit = Literal["tensor", "experts", "both"]


@dataclass(frozen=True)
class LocalExperts:
    """Experts of a layer on this rank: [start, stop) of `total`.

    Of E experts and R ranks the first E % R ranks have E // R + 1 and all others E // R, one run of them
    after another. ArgumentError for a run outside of the total.

    Attributes
    ----------
    start, stop
        The first expert that is here, and the first after it that is not.
    total
        How many experts the layer has on all ranks together.
    """

    start: int
    stop: int
    total: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.start <= self.stop <= self.total:
            expected = f"0 <= start <= stop <= total = {self.total}"
            raise ArgumentError("local", expected, f"start {self.start}, stop {self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def map(self) -> Tensor:
        """(total,) int64: the place on this rank of each expert of the layer; -1: it is not here."""
        found = torch.full((self.total,), -1, dtype=torch.int64)
        found[self.start : self.stop] = torch.arange(len(self))
        return found


def local_experts(prefix: str, total: int, group: ProcessGroup) -> LocalExperts:
    """This rank's experts; DivideError, on every rank, if a rank would have none."""
    ranks, rank = group.size(), group.rank()
    if ranks > total:
        lawful = [world for world in WORLDS if world <= total]
        hint = f"lawful   {worlds(lawful)}"
        raise DivideError(prefix, "experts", total, f"{ranks} ranks, each with one at least", hint)
    each, more = divmod(total, ranks)
    start = rank * each + min(rank, more)
    return LocalExperts(start, start + each + (rank < more), total)


@dataclass(frozen=True)
class Grid:
    """Groups of a rank: `tensor` cuts the same experts, `experts` distributes whole experts."""

    tensor: ProcessGroup
    experts: ProcessGroup


def grid(split: ExpertSplit | None, group: ProcessGroup, expert_ranks: int | None) -> Grid:
    """Divide a world into groups; for "both", rank r is rank r % T of the group that cuts run r // T.

    DivideError for a world that is not a multiple of `expert_ranks`; ArgumentError for a missing
    `expert_ranks`, and for one without "both".
    """
    if (split == "both") == (expert_ranks is None):
        expected = "how many runs of experts there are" if split == "both" else 'None, unless split is "both"'
        raise ArgumentError("expert_ranks", expected, repr(expert_ranks))
    if expert_ranks is None:
        return Grid(group if split == "tensor" else ALONE, group if split == "experts" else ALONE)
    world, rank = group.size(), group.rank()
    if expert_ranks < 1:
        raise ArgumentError("expert_ranks", "at least 1", repr(expert_ranks))
    if world % expert_ranks:
        raise DivideError("expert_ranks", "ranks", world, f"{expert_ranks} runs of experts")
    cutting = world // expert_ranks
    return Grid(Rank(rank % cutting, cutting), Rank(rank // cutting, expert_ranks))
