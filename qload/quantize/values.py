"""What has no scale, or is lost in the float that a format is made of: refused by name and value."""

import torch
from torch import Tensor

from qload.errors import CastError, MismatchError, ShapeError, check_values
from qload.spec import named
from qload.spec.casts import check_cast


def check_finite(weight: Tensor, name: str) -> None:
    """No NaN and no infinity, or MismatchError: neither has a scale."""
    wrong = (~torch.isfinite(weight)).nonzero()
    if wrong.numel():
        n, k = wrong[0].tolist()
        raise MismatchError(
            named(name, "weight"),
            "cannot be quantized",
            "finite values",
            f"{weight[n, k]:g} at ({n}, {k}) ({wrong.shape[0]} in all)",
        )


def floats(weight: Tensor, dtype: torch.dtype, name: str, remedy: str) -> Tensor:
    """A weight (N, K) in the float that it is quantized from.

    What has no elements, no finite values, or values that `dtype` cannot hold is refused; so is an output
    that would be nothing but zeros, and is not.
    """
    full = named(name, "weight")
    if 0 in weight.shape:
        raise ShapeError(full, "(N, K), each at least 1, to be quantized", weight.shape)
    check_values(full, weight)
    check_values(full, weight)
    check_finite(weight, name)
    made = weight.to(dtype)
    if torch.promote_types(weight.dtype, dtype) != dtype:
        check_cast(full, weight, made, tiny=False, remedy=remedy)
        check_outputs(full, weight.abs().amax(1), made.abs().amax(1), remedy)
    return made


def check_outputs(tensor: str, before: Tensor, after: Tensor, remedy: str) -> None:
    """CastError where the size of an output, one entry each, was above 0 and is 0 now."""
    lost = before[(before > 0) & (after == 0)]
    if lost.numel():
        source, target = (str(each.dtype).removeprefix("torch.") for each in (before, after))
        raise CastError(tensor, source, target, float(lost[0]), lost.numel(), remedy)
