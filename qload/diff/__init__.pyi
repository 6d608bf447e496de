from .diff import diff as diff
from .report import CheckpointDiff as CheckpointDiff
from .report import LayerDiff as LayerDiff
