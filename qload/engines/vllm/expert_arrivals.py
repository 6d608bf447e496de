"""The tensors of a layer's experts as they arrive, each cut to this rank's share, read as one storage."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from qload.errors import MissingTensorError
from qload.loader import ConfiguredFormat
from qload.methods.arrivals import Arrivals
from qload.methods.placement import Placement
from qload.methods.share_shapes import ParameterSlot, check_cuts, slots
from qload.parallel import ProcessGroup
from qload.spec import named
from qload.storage import TensorInfo
from qload.storage.protocol import missing

MATRICES: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # by vLLM's names


class ExpertArrivals:
    """A storage of experts, numbered from 0 on this rank: `experts.0.gate_proj.qweight`.

    Parameters
    ----------
    prefix
        What the names begin with.
    formats
        What the experts may be stored as.
    sizes
        (H, I): inputs of an expert, and what lies between its matrices, on this rank.
    group
        The ranks that cut the same experts.
    params_dtype
        Of plain numbers.
    """

    def __init__(
        self,
        prefix: str,
        formats: Sequence[ConfiguredFormat],
        sizes: tuple[int, int],
        group: ProcessGroup,
        params_dtype: torch.dtype,
    ) -> None:
        self.prefix, self.group = prefix, group
        self._sizes = sizes
        matrices = [fmt for fmt in formats if _is_matrix(fmt)]
        self.formats = tuple(matrices)
        first = next((fmt for fmt in matrices if not fmt.weight_type.plain), matrices[0])
        self.slots: dict[str, Mapping[str, ParameterSlot]] = {}
        for shard in MATRICES:
            place = self._place(0, shard)
            check_cuts(first, place)
            self.slots[shard] = slots(matrices, place, params_dtype, by_tags=False)
        self._of: dict[str, Arrivals] = {}

    def take(self, expert: int, shard: str, suffix: str, loaded: Tensor, device: torch.device) -> None:
        """Keep this rank's share of a tensor of an expert, `shard` "w1" (gate), "w3" (up) or "w2" (down)."""
        place = self._place(expert, shard)
        own = self._of.setdefault(place.prefix, Arrivals(place, self.slots[shard]))
        empty = nn.Parameter(torch.empty(0, dtype=loaded.dtype, device=device), requires_grad=False)
        own.take(suffix, empty, loaded, None)

    def keys(self) -> Collection[str]:
        """The names of all tensors."""
        return [name for own in self._of.values() for name in [*own.keys()]]

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of the whole tensor `name`."""
        return self._find(name).info(name)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """The elements `index` of the tensor `name`, as they lie here; ArgumentError for another rank's."""
        return self._find(name).read(name, index)

    def close(self) -> None:
        """Let go of all tensors."""
        self._of.clear()

    def _find(self, name: str) -> Arrivals:
        number, matrix, _ = (*name.removeprefix(f"{self.prefix}.").split(".", 2), "", "")[:3]
        own = self._of.get(f"{self.prefix}.{number}.{matrix}")
        if own is None:
            error: MissingTensorError = missing(name, self.keys())
            raise error
        return own

    def _place(self, expert: int, shard: str) -> Placement:
        prefix = named(f"{self.prefix}.{expert}", MATRICES[shard])
        (H, inner), ranks = self._sizes, self.group.size()
        here, whole = ((H, inner), (inner * ranks, H)) if shard != "w2" else ((inner, H), (H, inner * ranks))
        K, N = here
        return Placement(prefix, (prefix,), (0,), (N,), K, whole, self.group, is_told=True)


def _is_matrix(fmt: ConfiguredFormat) -> bool:
    return all(not suffix.startswith("_") for spec in fmt.specs() for suffix in spec.suffixes)
