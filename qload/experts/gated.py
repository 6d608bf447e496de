"""What an expert does between its two products: an activation of the gate, times up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from qload.errors import ArgumentError, check_fields

Kind = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]

PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class GatedActivation:
    """How gate and up (..., I) become one: `activation(gate, up)` -> (..., I), in their dtype.

    ArgumentError for a `limit` or an `alpha` where the kind has none, and for one that is no number above 0.

    Attributes
    ----------
    kind
        "silu", "gelu" and "gelu_tanh" (the approximation with a hyperbolic tangent): act(gate) * up.
        "clamped_swiglu": gate is cut off above `limit`, up on both sides, and
        (up + 1) * gate * sigmoid(alpha * gate). Source: `GptOssExperts` of transformers 5.23.0.
    alpha, limit
        Of "clamped_swiglu"; gpt-oss has 1.702 and 7.0. None for all others.
    """

    kind: Kind
    alpha: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        clamped = self.kind == "clamped_swiglu"
        for name, number in (("alpha", self.alpha), ("limit", self.limit)):
            lawful = number is not None and isfinite(number) and number > 0 if clamped else number is None
            if not lawful:
                raise ArgumentError(
                    name, "a number above 0" if clamped else f"None for {self.kind}", str(number)
                )

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Gate (..., I) and up (..., I) as one (..., I); NaN stays NaN."""
        if self.alpha is None or self.limit is None:
            return PLAIN[self.kind](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
