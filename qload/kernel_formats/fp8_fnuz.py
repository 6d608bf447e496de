"""FP8 in e4m3fnuz, the dtype of AMD's kernels before gfx950: values of bytes halve, and scales double."""

from dataclasses import replace

import torch
from torch import Tensor

from qload.errors import DtypeError, MismatchError
from qload.formats import Fp8Weight
from qload.spec import named
from qload.spec.casts import check_cast

NEGATIVE_ZERO, NAN = 0x80, 0x7F  # bytes of e4m3fn; in e4m3fnuz they are NaN and 240


def to_fnuz(weight: Fp8Weight) -> Fp8Weight:
    """Convert an e4m3fn weight to e4m3fnuz: values of bytes halve, -0 becomes 0, and scales double.

    NaN bytes of e4m3fn are refused, because they are 240 or -240 in e4m3fnuz. CastError if the dtype of a
    scale cannot represent its double, or the half of a dividing one.
    """
    name = weight.layer.name or "Fp8Weight"
    if weight.weight.dtype != torch.float8_e4m3fn:
        got = str(weight.weight.dtype).removeprefix("torch.")
        raise DtypeError(named(name, "weight"), ["float8_e4m3fn"], got)
    stored = weight.weight.view(torch.uint8)
    lost = int(((stored & NAN) == NAN).sum())
    if lost:
        what = "e4m3fnuz would read NaN as a number"
        raise MismatchError(named(name, "weight"), what, "no byte 0x7F or 0xFF", f"{lost} of them")
    bytes_ = torch.where(stored == NEGATIVE_ZERO, 0, stored).to(torch.uint8)
    times, limit = (0.5 if weight.config.divide else 2), weight.input_scale
    return replace(
        weight,
        weight=bytes_.view(torch.float8_e4m3fnuz),
        weight_scale=_scaled(named(name, "weight_scale"), weight.scales, times),
        input_scale=None if limit is None else _scaled(named(name, "input_scale"), limit, 2),
    )


def _scaled(name: str, scale: Tensor, times: float) -> Tensor:
    """Multiply a scale by a power of two in its own dtype; CastError if this is not exact."""
    exact = scale.double() * times
    cast = exact.to(scale.dtype)
    remedy = "keep this layer in e4m3fn, or store its scales in float32"
    check_cast(name, exact, cast, tiny=True, remedy=remedy, stored=scale.dtype)
    return cast
