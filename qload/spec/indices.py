"""What is checked of index tensors before anything is looked up by them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from qload.errors import IndexValueError, check_values
from qload.spec.tensor import Names, TensorSpec


def check_index(spec: TensorSpec, index: Tensor, sizes: Mapping[str, int], names: Names) -> None:
    """Every value of an index tensor lies in the free axis it points into, or IndexValueError."""
    check_values(names.full(spec.name), index)
    limit = sizes[spec.index_of or ""]
    wrong = ((index < 0) | (index >= limit)).nonzero()
    if wrong.numel():
        at = int(wrong[0, 0])
        raise IndexValueError(
            names.full(spec.name), int(index[at]), at, limit, wrong.shape[0], names.file(spec.name)
        )


def check_permutation(spec: TensorSpec, index: Tensor, names: Names) -> None:
    """An index tensor names every one of its places once, or IndexValueError."""
    check_values(names.full(spec.name), index)
    at, size = index.long(), index.numel()
    wrong = (at < 0) | (at >= size)
    taken = torch.bincount(at[~wrong], minlength=size)  # what lies outside has no place to be counted at
    wrong[~wrong] = taken[at[~wrong]] > 1
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        raise IndexValueError(
            names.full(spec.name),
            int(at[first]),
            first,
            size,
            int(wrong.sum()),
            names.file(spec.name),
            "each once",
        )
