"""Process groups, their collectives, and worlds of ranks.

A process group is any object with `rank()` and `size()`, such as a group of torch.distributed. Loads never
communicate. Layers sum and gather with `collectives_of` a group; a row-parallel layer with dynamically
quantized inputs also reduces their maximum with `maximum_over`.
"""

from qload.parallel.launcher import agree, joined_world
from qload.parallel.process_group import (
    ALONE,
    Collectives,
    FakeWorld,
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
