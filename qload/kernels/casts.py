"""What a cast of floats loses: infinities made of numbers, and numbers that fall below the narrow range."""

import torch
from torch import Tensor

from qload.errors import CastError


def check_cast(tensor: str, before: Tensor, after: Tensor, *, tiny: bool, remedy: str) -> None:
    """CastError where `after` holds an infinity for a number of `before`.

    `tiny`: also where a number costs more than one rounding, as it is 0 or subnormal now: a scale's bits
    are lost in every weight of its group.
    """
    dtype = torch.float64 if before.dtype == torch.float64 else torch.float32  # a weight is large
    wide, got = before.detach().to(after.device, dtype), after.detach().to(dtype)
    lost = torch.isinf(got) & torch.isfinite(wide)
    if tiny:
        unit = torch.finfo(after.dtype).eps / 2
        lost |= (got - wide).abs() > unit * wide.abs()
    if bool(lost.any()):
        source, target = (str(t.dtype).removeprefix("torch.") for t in (before, after))
        raise CastError(tensor, source, target, float(wide[lost][0]), int(lost.sum()), remedy)
