"""Experts: which of them a router chooses and with what weights, and what lies between gate and up."""

from qload.experts.config import routing_of
from qload.experts.gated import GatedActivation
from qload.experts.routing import Routing

__all__ = ["GatedActivation", "Routing", "routing_of"]
