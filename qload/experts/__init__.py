"""Experts of mixtures: stacks of them as layers of their own."""

from qload.experts.stacks import ExpertStacks, with_experts

__all__ = ["ExpertStacks", "with_experts"]
