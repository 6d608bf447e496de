"""Do two checkpoints mean the same, whatever their formats, shards and names?"""

from qload.diff.diff import diff
from qload.diff.report import CheckpointDiff, LayerDiff

__all__ = ["CheckpointDiff", "LayerDiff", "diff"]
