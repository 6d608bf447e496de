"""What an expert does beside its matrices: its activation, and where the routing weight goes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qload.architecture import Architecture
from qload.architecture.model_tables import GATING
from qload.errors import ArgumentError, check_fields
from qload.experts.gated import GatedActivation

# transformers' names of activations, of which several mean one function.
ACTIVATIONS: Mapping[str, GatedActivation] = {
    **dict.fromkeys(("silu", "swish"), GatedActivation("silu")),
    **dict.fromkeys(("gelu", "gelu_python"), GatedActivation("gelu")),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), GatedActivation("gelu_tanh")),
}


@dataclass(frozen=True)
class ExpertFacts:
    """What experts do between their matrices, and where the routing weight goes; no tensor tells.

    Attributes
    ----------
    activation
        What gate and up become before the down projection.
    side
        What the routing weight of an expert multiplies: its "output", or its "input", as in Llama 4.
    """

    activation: GatedActivation
    side: Literal["output", "input"] = "output"

    def __post_init__(self) -> None:
        check_fields(self)


def facts_of(architecture: Architecture | None) -> ExpertFacts:
    """What a model's config tells of its experts; ArgumentError that says what to pass where it does not.

    Nothing is guessed: of a type of model that no table has, or an activation of another name, the caller has
    to say.
    """
    if architecture is None:
        raise _unknown("a model's config that is not known")
    gating = GATING.get(architecture.type)
    if gating is None:
        raise _unknown(f"model_type {architecture.type!r}, of which nothing is known")
    if gating.alpha is not None and gating.limit is not None:
        alpha, limit = (_number(architecture.config, *said) for said in (gating.alpha, gating.limit))
        return ExpertFacts(GatedActivation("clamped_swiglu", alpha, limit), gating.weighted)
    said = architecture.config.get(gating.key, gating.default)
    known = ACTIVATIONS.get(said) if isinstance(said, str) else None
    if known is None:
        raise _unknown(f"{gating.key} {said!r:.80} in the config")
    return ExpertFacts(known, gating.weighted)


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise _unknown(f"{key} {value!r:.80} in the config")
    return float(value)


def _unknown(got: str) -> ArgumentError:
    return ArgumentError("facts", "ExpertFacts(GatedActivation(...), side) of this model", got)
