"""The load of a layer's experts, which `Weights` answers beside those of single layers."""

from qload.errors import UnsupportedFormatError, checked
from qload.experts import ExpertFacts, ExpertSplit, ExpertsWeight
from qload.experts.load import Owner, load_experts, load_stacked
from qload.experts.stack_layouts import stack_names
from qload.experts.stacked_storage import ExpertStacks
from qload.experts.weight import StackedWeight
from qload.loader import Split

REMEDY = "read its tensors as stored by get_tensor"


class ExpertLoads:
    """What `Weights` is asked for experts by."""

    @checked
    def get_experts(
        self: Owner,
        prefix: str,
        *,
        split: ExpertSplit | None = None,
        expert_ranks: int | None = None,
        facts: ExpertFacts | None = None,
    ) -> ExpertsWeight:
        """The experts of a layer, stacked, or this rank's share of them.

        Read one at a time into memory that is taken once. All of them are compared, and all cuts of all
        ranks checked, before a weight is read: MissingTensorError for a missing one, MismatchError for one
        that is not stored as the first, CutError and DivideError as of single layers. Of the experts of
        other ranks no weight is read.

        Parameters
        ----------
        prefix
            What the names of the experts begin with: `model.layers.0.mlp.experts`.
        split
            None: all of all experts, on every rank. "tensor": of every expert this rank's outputs of gate and
            up, and its inputs of down, so that the ranks' outputs are summed. "experts": whole experts, of E
            on R ranks the first E % R ranks one more than the others. "both": see `expert_ranks`.
        expert_ranks
            Of "both", how many runs of experts there are; rank r has a share of run r // T, and is place
            r % T of the T = ranks / `expert_ranks` that cut the same experts.
        facts
            What stands between the matrices, and where the routing weight goes; None: as the model's config
            says. ArgumentError where that does not tell.
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
