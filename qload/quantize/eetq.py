"""Quantizes plain layers to EETQ, with the codes and scales that EETQ itself makes of an fp16 weight.

    s[n] = fp16(max |w[n]| / 128)
    code[n, k] = w[n, k] / (max |w[n]| / 128) in float32, rounded half away from zero, within -128 and 127

A small scale loses bits, as EETQ's own does; an output whose scale would be 0 is refused, unless it is zeros.
Source: EETQ 465e972.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qload.errors import ShapeError
from qload.formats import EETQConfig, EETQWeight
from qload.layouts import eetq
from qload.quantize.values import check_outputs, floats
from qload.spec import Layer, named
from qload.spec.casts import check_cast

LEVELS = 128
PLAIN = "leave this layer plain: its largest or its smallest outputs have no scale in fp16"


@dataclass(frozen=True)
class EETQQuantizer:
    """Plain layers to EETQ: 8 bits, one scale an output."""

    format: ClassVar[str] = "eetq"
    per_share: ClassVar[bool] = True  # outputs know nothing of each other

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype = torch.float16) -> EETQWeight:
        """The float `weight` (N, K) as an EETQWeight of `layer`, N and K multiples of 64, or ShapeError.

        Scales are fp16 whatever `dtype` is: the kernel takes no other.
        """
        _check_tiles(tuple(weight.shape), layer)
        wide = floats(weight, torch.float32, layer.name, PLAIN)
        steps = wide.abs().amax(1) / LEVELS
        scales, name = steps.half(), named(layer.name, "weight_scales")
        check_cast(name, steps, scales, tiny=False, remedy=PLAIN)
        check_outputs(name, steps, scales, PLAIN)
        codes = _round_half_away(wide / steps.where(steps > 0, 1)[:, None]).clamp(-LEVELS, LEVELS - 1)
        return EETQWeight(
            config=EETQConfig(),
            weight=eetq.pack((codes + LEVELS).to(torch.int32)),
            weight_scales=scales,
            layer=layer,
        )


def _check_tiles(shape: tuple[int, ...], layer: Layer) -> None:
    """A share may fill no tiles where the layer does: the world size is at fault then."""
    remedy = f"remedy   cut {layer.whole} into fewer shares, or leave this layer plain"
    for size, hint in ((layer.whole, ""), (shape, remedy)):
        if any(length % eetq.TILE for length in size):
            needs = f"(N, K), both multiples of {eetq.TILE}, which EETQ needs"
            raise ShapeError(named(layer.name, "weight"), needs, size, hint=hint)


def _round_half_away(values: Tensor) -> Tensor:
    """0.5 -> 1, -0.5 -> -1; exact, where adding one half would round 0.49999997 up."""
    whole = values.trunc()
    return whole + torch.where((values - whole).abs() >= 0.5, values.sign(), 0)
