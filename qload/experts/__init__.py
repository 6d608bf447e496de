"""Experts: a layer's experts by names of their own, and as stacked typed weights; their routing."""

from qload.experts.config import routing_of
from qload.experts.facts import ExpertFacts
from qload.experts.gated import GatedActivation
from qload.experts.local import ExpertSplit, LocalExperts
from qload.experts.routing import Routing
from qload.experts.stack import Stack
from qload.experts.stacks import ExpertStacks, with_experts
from qload.experts.weight import Expert, ExpertsWeight

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
