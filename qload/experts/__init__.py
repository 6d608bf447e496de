"""Experts: a layer's experts by names of their own, and as stacked typed weights; their routing."""

from qload.experts.activation import ExpertFacts, GatedActivation
from qload.experts.expert_parallel import ExpertSplit, LocalExperts
from qload.experts.routing import Routing, routing_of
from qload.experts.stacked_storage import ExpertStacks, with_experts
from qload.experts.weight import Expert, ExpertsWeight, Stack

__all__ = [
    "Expert",
    "ExpertFacts",
    "ExpertSplit",
    "ExpertStacks",
    "ExpertsWeight",
    "GatedActivation",
    "LocalExperts",
    "Routing",
    "Stack",
    "routing_of",
    "with_experts",
]
