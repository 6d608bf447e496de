"""Before a checkpoint is loaded: among how many ranks it can be shared, and what each of them holds."""

from qload.plan.alternatives import Alternative
from qload.plan.plan import plan
from qload.plan.report import LayerShare, PlannedLayer, ShardingPlan, WorldPlan

__all__ = ["Alternative", "LayerShare", "PlannedLayer", "ShardingPlan", "WorldPlan", "plan"]
