"""Before a checkpoint is loaded: among how many ranks it can be shared, and which kernels will run."""

from qload.plan.alternatives import Alternative
from qload.plan.explain import explain
from qload.plan.explained import ExplainedLayer, Explanation
from qload.plan.kernels import KernelChoice
from qload.plan.plan import plan
from qload.plan.report import LayerShare, PlannedLayer, ShardingPlan, WorldPlan

__all__ = [
    "Alternative",
    "ExplainedLayer",
    "Explanation",
    "KernelChoice",
    "LayerShare",
    "PlannedLayer",
    "ShardingPlan",
    "WorldPlan",
    "explain",
    "plan",
]
