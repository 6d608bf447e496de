"""The experts of a layer on this rank, whichever way the ranks share them."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from qload.experts import ExpertFacts, ExpertSplit, ExpertsWeight
from qload.kernels.declared import Maximum
from qload.kernels.dtypes import DTYPES
from qload.methods.loaded import maximum_for
from qload.parallel import Collectives, collectives_of
from qload.weights import Weights

ExpertsFactory = Callable[[ExpertsWeight, Maximum], nn.Module]


class ParallelExperts(nn.Module):
    """Experts of which a rank has a share: what these make is a summand, or the ranks' sum.

    Parameters
    ----------
    experts
        A module (x, topk_ids, topk_weights) -> y of this rank's, as `ExpertsWeight.get_linear` makes it.
    collectives
        The ranks whose outputs are summed; None: they are not.
    """

    def __init__(self, experts: nn.Module, collectives: Collectives | None = None) -> None:
        super().__init__()
        self.experts: nn.Module = experts
        self.collectives: Collectives | None = collectives

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        *,
        split: ExpertSplit | None = "tensor",
        expert_ranks: int | None = None,
        facts: ExpertFacts | None = None,
        reduce_results: bool = False,
        make_experts: ExpertsFactory | None = None,
    ) -> Self:
        """This rank's share of the experts that `weights` has under `prefix`; the errors of `get_experts`.

        Parameters
        ----------
        weights, prefix, split, expert_ranks, facts
            As of `Weights.get_experts`.
        reduce_results
            Whether all ranks have the sum; False leaves that to who adds shared experts first.
        make_experts
            The module of an `ExpertsWeight`, and of what finds a maximum over the ranks that cut the same
            experts; None: `ExpertsWeight.get_linear`.
        """
        ranks = collectives_of(weights.process_group) if reduce_results and split is not None else None
        loaded = weights.get_experts(prefix, split=split, expert_ranks=expert_ranks, facts=facts)
        down = loaded.down.layer
        maximum = maximum_for(down, weights.process_group) if split == "tensor" else None
        dtype = weights.dtype if weights.dtype in DTYPES else None
        make = make_experts or (lambda weight, maximum: weight.get_linear(maximum=maximum, dtype=dtype))
        return cls(make(loaded, maximum), ranks)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """What experts make of x (..., H), in its dtype; `topk_ids`, `topk_weights` (T, k): of each token."""
        y: Tensor = self.experts(x, topk_ids, topk_weights)
        return y if self.collectives is None else self.collectives.summed(y)
