"""Activations of experts: the function of gate and up, and the side of the routing weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from qload.architecture import Architecture
from qload.architecture.model_tables import GATING
from qload.errors import ArgumentError, check_fields
from qload.lazy_torch import Tensor, torch

Kind = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return torch.nn.functional.silu(x)


def gelu(x: Tensor) -> Tensor:
    """Return x * P(X <= x) for a normal X, by the error function."""
    return torch.nn.functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the approximation of `gelu` with a hyperbolic tangent."""
    return torch.nn.functional.gelu(x, approximate="tanh")


PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}


@dataclass(frozen=True)
class GatedActivation:
    """Activation of an expert: `activation(gate, up)` (..., I) -> (..., I), in their dtype.

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


# transformers' names of activations, of which several mean one function.
ACTIVATIONS: Mapping[str, GatedActivation] = {
    **dict.fromkeys(("silu", "swish"), GatedActivation("silu")),
    **dict.fromkeys(("gelu", "gelu_python"), GatedActivation("gelu")),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), GatedActivation("gelu_tanh")),
}


@dataclass(frozen=True)
class ExpertFacts:
    """Activation of the experts, and the side of the routing weight; no tensor states them.

    Attributes
    ----------
    activation
        Function of gate and up; its result is the input of down.
    side
        Factor of the routing weight: an expert's "output", or its "input" as in Llama 4.
    """

    activation: GatedActivation
    side: Literal["output", "input"] = "output"

    def __post_init__(self) -> None:
        check_fields(self)


def facts_of(architecture: Architecture | None) -> ExpertFacts:
    """Read the activation from a model's config; ArgumentError, with a remedy, if it is unknown.

    Nothing is guessed: for a model type without a table, or an unknown activation, the caller has to pass it.
    """
    if architecture is None:
        raise _unknown("a model's config that is not known")
    gating = GATING.get(architecture.type)
    if gating is None:
        raise _unknown(f"model_type {architecture.type!r}, of which nothing is known")
    if gating.alpha is not None and gating.limit is not None:
        alpha, limit = (_number(architecture.config, *said) for said in (gating.alpha, gating.limit))
        return ExpertFacts(GatedActivation("clamped_swiglu", alpha, limit), gating.weighted)
    said = architecture.config.get("hidden_act", "silu")
    known = ACTIVATIONS.get(said) if isinstance(said, str) else None
    if known is None:
        raise _unknown(f"hidden_act {said!r:.80} in the config")
    return ExpertFacts(known, gating.weighted)


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise _unknown(f"{key} {value!r:.80} in the config")
    return float(value)


def _unknown(got: str) -> ArgumentError:
    return ArgumentError("facts", "ExpertFacts(GatedActivation(...), side) of this model", got)
