"""Casts of plain floats to the dtype of the user, without overflow."""

from __future__ import annotations

from qload.dtypes import STORED
from qload.errors import CastError
from qload.formats import ROLES
from qload.formats.unquantized import FLOATS
from qload.lazy_torch import Tensor, torch
from qload.spec import Role


def by_role(stored: str, tensor: Tensor, dtype: torch.dtype | None, role: Role | None) -> Tensor:
    """Cast the tensor `stored` to a dtype, if its role allows; without a role, the role of its name."""
    role = role or ROLES.get(stored.rpartition(".")[2], Role.FLOAT)
    if role is not Role.FLOAT or dtype in (None, tensor.dtype) or STORED[tensor.dtype] not in FLOATS:
        return tensor
    return cast(stored, tensor, dtype)


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a plain tensor; CastError for a value that overflows."""
    result = tensor.to(dtype)
    lost = torch.isfinite(tensor) & ~torch.isfinite(result)
    if lost.any():
        source, target = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, dtype))
        raise CastError(name, source, target, float(tensor[lost][0]), int(lost.sum()))
    return result
