"""Every seeded fault, by what it breaks."""

from qload.testing.faults import checkpoints, cuda, formats, marlin, rules, stacks
from qload.testing.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *checkpoints.FAULTS, *marlin.FAULTS, *cuda.FAULTS, *formats.FAULTS, *rules.FAULTS,
    *stacks.FAULTS,
)  # fmt: skip
