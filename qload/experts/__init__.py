"""Experts: the matrices of a layer's experts as stacked typed weights, whole or a rank's share."""

from qload.experts.facts import ExpertFacts
from qload.experts.gated import GatedActivation
from qload.experts.local import ExpertSplit, LocalExperts
from qload.experts.stack import Stack
from qload.experts.weight import Expert, ExpertsWeight

__all__ = [
    "Expert",
    "ExpertFacts",
    "ExpertSplit",
    "ExpertsWeight",
    "GatedActivation",
    "LocalExperts",
    "Stack",
]
