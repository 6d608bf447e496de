"""Names of checkpoint formats in tables and pages."""

# The checkpoint format "marlin" of configs; `repack` and targets call the order of Marlin's kernels "marlin".
MARLIN_CHECKPOINT = "marlin_checkpoint"


def format_label(name: str) -> str:
    """The name of a checkpoint format in tables and pages, where kernel orders stand beside it."""
    return MARLIN_CHECKPOINT if name == "marlin" else name
