"""All seeded faults, by the area of the source."""

from tests.faults import (
    activations,
    checkpoints,
    conformance,
    cpu,
    cuda,
    diagnosis,
    engine_transformers,
    engine_vllm,
    experts,
    formats,
    gguf,
    latent,
    marlin,
    mlx,
    models,
    mx,
    parallel,
    planning,
    quark,
    routing,
    row_blocks,
    rules,
    stacks,
    torchao,
)
from tests.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *checkpoints.FAULTS, *marlin.FAULTS, *cuda.FAULTS, *cpu.FAULTS, *formats.FAULTS, *gguf.FAULTS,
    *mlx.FAULTS, *mx.FAULTS, *torchao.FAULTS, *quark.FAULTS, *row_blocks.FAULTS,
    *rules.FAULTS, *experts.FAULTS, *stacks.FAULTS, *routing.FAULTS, *activations.FAULTS, *models.FAULTS,
    *parallel.FAULTS, *latent.FAULTS, *diagnosis.FAULTS, *conformance.FAULTS, *planning.FAULTS,
    *engine_transformers.FAULTS, *engine_vllm.FAULTS,
)  # fmt: skip
