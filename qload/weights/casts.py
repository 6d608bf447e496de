"""Plain floats in the dtype that a user asks for, and no value lost."""

import torch
from torch import Tensor

from qload.errors import CastError
from qload.formats import ROLES
from qload.formats.unquantized import FLOATS
from qload.spec import Role


def by_role(stored: str, tensor: Tensor, dtype: torch.dtype | None, role: Role | None) -> Tensor:
    """The tensor `stored` in the dtype that is asked for, where its role, or else its name, allows a cast."""
    role = role or ROLES.get(stored.rpartition(".")[2], Role.FLOAT)
    if role is not Role.FLOAT or dtype in (None, tensor.dtype) or tensor.dtype not in FLOATS:
        return tensor
    return cast(stored, tensor, dtype)


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A plain tensor in another dtype, or CastError where a value does not fit."""
    made = tensor.to(dtype)
    lost = torch.isfinite(tensor) & ~torch.isfinite(made)
    if lost.any():
        source, target = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, dtype))
        raise CastError(name, source, target, float(tensor[lost][0]), int(lost.sum()))
    return made
