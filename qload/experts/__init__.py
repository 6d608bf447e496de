"""Experts: a layer's experts by names of their own, and as stacked typed weights, whole or a rank's share."""

from qload.experts.facts import ExpertFacts
from qload.experts.gated import GatedActivation
from qload.experts.local import ExpertSplit, LocalExperts
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
    "Stack",
    "with_experts",
]
