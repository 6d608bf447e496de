"""What a cast of floats loses: infinities made of numbers, and numbers that fall below the narrow range."""

import torch
from torch import Tensor

from qload.errors import CastError


def check_cast(
    tensor: str,
    before: Tensor,
    after: Tensor,
    *,
    tiny: bool,
    remedy: str,
    stored: torch.dtype | None = None,
) -> None:
    """CastError where `after` holds an infinity or NaN for a number of `before`.

    `tiny`: also where a number costs more than one rounding, as it is 0 or subnormal now: a scale's bits
    are lost in every weight of its group. `stored`: the dtype that is named, where `before` was computed.
    """
    dtype = torch.float64 if before.dtype == torch.float64 else torch.float32  # a weight is large
    wide, got = before.detach().to(after.device, dtype), after.detach().to(dtype)
    lost = ~torch.isfinite(got) & torch.isfinite(wide)
    if tiny:
        unit = torch.finfo(after.dtype).eps / 2
        lost |= (got - wide).abs() > unit * wide.abs()
    if bool(lost.any()):
        source, target = (str(t).removeprefix("torch.") for t in (stored or before.dtype, after.dtype))
        raise CastError(tensor, source, target, float(wide[lost][0]), int(lost.sum()), remedy)
