"""Loads of experts, and reads into memory of the caller."""

from qload.errors import UnsupportedFormatError, checked
from qload.experts import ExpertFacts, ExpertSplit, ExpertsWeight
from qload.experts.expert_description import Owner
from qload.experts.load import load_experts, load_stacked
from qload.experts.stack_layouts import stack_names
from qload.experts.stacked_storage import ExpertStacks
from qload.experts.weight import StackedWeight
from qload.loader import Split

MAX_STAGED_BYTES = 4 << 20  # read to the CPU at once, on the way to a device; larger tensors are read alone
REMEDY = "read its tensors as stored by get_tensor"


class ExpertLoads:
    """Methods of `Weights` for experts."""

    @checked
    def get_experts(
        self: Owner,
        prefix: str,
        *,
        split: ExpertSplit | None = None,
        expert_ranks: int | None = None,
        facts: ExpertFacts | None = None,
    ) -> ExpertsWeight:
        """Load the experts of a layer, or this rank's share of them, as stacked typed weights.

        Each tensor is read for all experts into one stack (E, ...). Before any weight is read, all experts
        are compared and all ranks' cuts are checked: MissingTensorError for a missing expert, MismatchError
        for one stored unlike the first, CutError and DivideError as for single layers. Weights of other
        ranks' experts are not read.

        Parameters
        ----------
        prefix
            Prefix of the experts' names: `model.layers.0.mlp.experts`.
        split
            None: all experts, whole, on every rank. "tensor": a share of every expert, along the outputs of
            gate and up and the inputs of down; the ranks' results are summed. "experts": whole experts; the
            first E % R of R ranks have one of the E experts more. "both": see `expert_ranks`.
        expert_ranks
            Number of runs of experts for "both". Rank r has a share of run r // T, as rank r % T of the
            T = ranks / `expert_ranks` that cut the same experts.
        facts
            Activation and side of the routing weight; None: by the model's config, with an ArgumentError if
            it does not state them.
        """
        return load_experts(self, prefix, split, expert_ranks, facts)

    def _load_stack(self: Owner, prefix: str, split: Split | None) -> StackedWeight | None:
        """Load the matrix of all experts under `prefix`; None for any other name.

        UnsupportedFormatError for an unreadable one.
        """
        storage = self.storage
        if not isinstance(storage, ExpertStacks) or type(prefix) is not str:
            return None
        for name in (prefix, f"{self.prefix}.{prefix}") if self.prefix else (prefix,):
            layers = storage.matrix(name)
            if layers is not None:
                return load_stacked(self.loader, self, name, layers, split)
            why = next((storage.unread[own] for own in stack_names(name) if own in storage.unread), None)
            if why is not None:
                raise UnsupportedFormatError(f"{name}: a matrix of several experts", why, remedy=REMEDY)
        return None
