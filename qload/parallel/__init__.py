"""A rank's view of its world: anything with `rank()` and `size()`, as torch.distributed's groups have.

Loads communicate nothing. Layers sum and gather by `collectives_of` a group, and a layer whose inputs are
quantized by their largest value needs one reduction where ranks have shares of its inputs: `maximum_over`.
"""

from qload.parallel.fake_world import FakeWorld
from qload.parallel.launcher import agree, joined_world
from qload.parallel.process_group import (
    ALONE,
    Collectives,
    ProcessGroup,
    Rank,
    ReducingGroup,
    collectives_of,
    maximum_over,
    register_capture,
)

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
