"""Shares of tensors that are in memory already, which `Weights` hands out beside those of files."""

from typing import Protocol

import torch
from torch import Tensor

from qload.errors import ArgumentError, DivideError, checked
from qload.parallel import ProcessGroup
from qload.spec import Role
from qload.weights.casts import by_role


class _Holder(Protocol):
    """What `Weights` is here."""

    device: torch.device
    dtype: torch.dtype | None
    process_group: ProcessGroup


class TensorShares:
    """What `Weights` is asked for tensors by that it does not hold."""

    @checked
    def get_tensor_shard(self: _Holder, tensor: Tensor, dim: int, *, role: Role | None = None) -> Tensor:
        """This rank's equal share along `dim` of a `tensor` in memory, on the device, cast by `role`.

        DivideError where there is none, ArgumentError for a dimension that the tensor does not have. With
        `role` None plain floats are cast as those that are stored are, and CastError where one does not fit.
        """
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ArgumentError("dim", f"a dimension of a tensor of shape {tuple(tensor.shape)}", str(dim))
        size, world, rank = tensor.shape[dim], self.process_group.size(), self.process_group.rank()
        if size % world:
            raise DivideError("tensor", dim % tensor.ndim, size, f"{world} ranks")
        share = tensor.narrow(dim, rank * size // world, size // world).to(self.device)
        return by_role("tensor", share, self.dtype, role)
