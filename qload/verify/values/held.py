"""Small tensors that were read just now, and will be read again in a moment."""

from collections.abc import Collection, Mapping
from copy import copy

from torch import Tensor

from qload.storage import TensorInfo, WeightStorage
from qload.weights import Weights


class Held:
    """A storage, some of whose tensors are in memory; what is read of these must not be written to."""

    def __init__(self, storage: WeightStorage, held: Mapping[str, Tensor]) -> None:
        self._storage, self._held = storage, held

    def keys(self) -> Collection[str]:
        """The names of all tensors."""
        return self._storage.keys()

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file of the tensor `name`."""
        return self._storage.info(name)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Exactly the elements `index` of the tensor `name`."""
        held = self._held.get(name)
        if held is None:
            return self._storage.read(name, index)
        return held[index].contiguous() if index else held

    def close(self) -> None:
        """Nothing: the storage is somebody else's."""


def holding(weights: Weights, held: Mapping[str, Tensor]) -> Weights:
    """The same weights, of whose tensors these are in memory, in their shapes."""
    twin = copy(weights)
    twin.storage = Held(weights.storage, held)
    return twin
