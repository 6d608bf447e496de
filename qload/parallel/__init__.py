"""A rank's view of its world: anything with `rank()` and `size()`, as torch.distributed's groups have.

Loads communicate nothing. Layers sum and gather by `collectives_of` a group, and a layer whose inputs are
quantized by their largest value needs one reduction where ranks have shares of its inputs: `maximum_over`.
"""

from qload.parallel.collectives import Collectives, collectives_of, maximum_over, register_capture
from qload.parallel.fake_world import FakeWorld
from qload.parallel.groups import ALONE, ProcessGroup, Rank, ReducingGroup
from qload.parallel.launched import agree, joined_world

__all__ = [
    "ALONE",
    "Collectives",
    "FakeWorld",
    "ProcessGroup",
    "Rank",
    "ReducingGroup",
    "agree",
    "collectives_of",
    "joined_world",
    "maximum_over",
    "register_capture",
]
