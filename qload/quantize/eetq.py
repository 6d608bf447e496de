"""Quantizes plain layers to EETQ, with the codes and scales that EETQ itself makes of an fp16 weight.

    s[n] = fp16(max |w[n]| / 128)
    code[n, k] = w[n, k] / (max |w[n]| / 128) in float32, rounded half away from zero, within -128 and 127

Source: formats.md section 7.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qload.errors import CastError, ShapeError
from qload.formats import EETQConfig, EETQWeight
from qload.layouts import eetq
from qload.quantize.loading import check_finite
from qload.spec import Layer, named

LEVELS = 128


@dataclass(frozen=True)
class EETQQuantizer:
    """Plain layers to EETQ: 8 bits, one scale an output."""

    format: ClassVar[str] = "eetq"
    per_share: ClassVar[bool] = True  # outputs know nothing of each other, and shares are multiples of 64

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype = torch.float16) -> EETQWeight:
        """A float (N, K) as an EETQWeight; scales are fp16 whatever `dtype` is: the kernel takes no other."""
        N, K = weight.shape
        if N % eetq.TILE or K % eetq.TILE:
            needs = f"(N, K), both multiples of {eetq.TILE}, which EETQ needs"
            raise ShapeError(named(layer.name, "weight"), needs, (N, K))
        check_finite(weight, layer.name)
        wide = weight.float()
        steps = wide.abs().amax(1) / LEVELS
        scales = steps.half()
        self._check_range(scales, steps, layer.name)
        codes = _round_half_away(wide / steps.where(steps > 0, 1)[:, None]).clamp(-LEVELS, LEVELS - 1)
        return EETQWeight(
            config=EETQConfig(),
            weight=eetq.pack((codes + LEVELS).to(torch.int32)),
            weight_scales=scales,
            layer=layer,
        )

    def _check_range(self, scales: Tensor, steps: Tensor, name: str) -> None:
        beyond = steps[scales.isinf()]
        if beyond.numel():
            raise CastError(
                named(name, "weight_scales"),
                "float32",
                "float16",
                float(beyond[0]),
                beyond.numel(),
                "leave this layer plain: its largest values have no fp16 scale",
            )


def _round_half_away(values: Tensor) -> Tensor:
    """0.5 -> 1, -0.5 -> -1; exact, where adding one half would round 0.49999997 up."""
    whole = values.trunc()
    return whole + torch.where((values - whole).abs() >= 0.5, values.sign(), 0)
