"""Prompt of a comparison of logits. It imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from qload.errors import check_fields


@dataclass(frozen=True)
class Prompt:
    """Token ids for a pass through a model, and the device of the pass.

    Attributes
    ----------
    ids
        Token ids; None: 24 random ids of the vocabulary, the same in every run.
    device
        Device of the kernels and of the exact products.
    """

    ids: Sequence[int] | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_fields(self)
