"""Whether two numbers are one, but for how a kernel of a type rounds them."""

from dataclasses import dataclass

import torch
from torch import Tensor

# How far two roundings to a type can bring two numbers apart, as a part of the larger one: half a unit in the
# last place each of bfloat16's 8 bits and float16's 11, and a few of float32.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-9, torch.float32: 2.0**-18}
HALVES = (torch.bfloat16, torch.float16)
CANCELLED = 2.0**-4  # of that, of a typical number: what is left of two larger ones that cancel


@dataclass(frozen=True)
class Closeness:
    """Compares numbers of one weight.

    Attributes
    ----------
    relative
        How far apart two numbers may be, as a part of the larger one.
    absolute
        And of any size.
    """

    relative: float
    absolute: float

    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        """Where the two are one number; NaN is none, and one infinity is itself."""
        apart = (one - other).abs()
        largest = torch.maximum(one.abs(), other.abs())
        return (one == other) | (largest.isfinite() & (apart <= self.relative * largest + self.absolute))


def closeness_of(expected: Tensor, got: Tensor) -> Closeness:
    """As the type of `got` rounds; of float32, as a 16-bit type does that all of it could be stored in."""
    finite = got[got.isfinite()]
    held = [dtype for dtype in HALVES if torch.equal(finite.to(dtype).to(finite.dtype), finite)]
    if got.dtype in HALVES:
        held = [got.dtype]
    relative = min((ROUNDING[dtype] for dtype in held), default=ROUNDING[torch.float32])
    sound = expected[expected.isfinite()].float()
    typical = float(sound.square().mean().sqrt()) if sound.numel() else 0.0
    return Closeness(relative, CANCELLED * relative * typical)
