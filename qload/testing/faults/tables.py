"""Every seeded fault, by what it breaks."""

from qload.testing.faults import activations, checkpoints, cuda, formats, marlin, rules
from qload.testing.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *checkpoints.FAULTS, *marlin.FAULTS, *cuda.FAULTS, *formats.FAULTS, *rules.FAULTS,
    *activations.FAULTS,
)  # fmt: skip
