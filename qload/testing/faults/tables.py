"""Every seeded fault, by what it breaks."""

from qload.testing.faults import (
    activations,
    checkpoints,
    cuda,
    engines,
    experts,
    formats,
    latent,
    marlin,
    models,
    parallel,
    routing,
    rules,
    stacks,
)
from qload.testing.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *checkpoints.FAULTS, *marlin.FAULTS, *cuda.FAULTS, *formats.FAULTS, *rules.FAULTS,
    *experts.FAULTS, *stacks.FAULTS, *routing.FAULTS, *activations.FAULTS, *models.FAULTS, *parallel.FAULTS,
    *latent.FAULTS, *engines.FAULTS,
)  # fmt: skip
