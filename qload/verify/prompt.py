"""What `verify` runs a model on, where it is asked for logits."""

from collections.abc import Sequence
from dataclasses import dataclass

from qload.errors import check_fields


@dataclass(frozen=True)
class Prompt:
    """Token ids, and where they go through a model.

    Attributes
    ----------
    ids
        Numbers of tokens; None: 24 that are drawn of the vocabulary, the same ones every time.
    device
        Where kernels are asked; what weights mean is computed there too.
    """

    ids: Sequence[int] | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_fields(self)
