"""What becomes of the processes that share a model."""

from dataclasses import dataclass
from typing import ClassVar

from qload.errors.base import QloadError, lines


@dataclass(eq=False)
class LostRankError(QloadError, RuntimeError):
    """A process of a world is gone, or never came, so that the others cannot go on.

    Raised by `joined_world` in every process that is left.

    Attributes
    ----------
    rank
        Which one; None: it is not known which.
    world
        How many there were to be.
    reason
        What is known of its end, in words.
    """

    rule: ClassVar[str] = "world"

    rank: int | None
    world: int
    reason: str

    def __str__(self) -> str:
        who = "a rank" if self.rank is None else f"rank {self.rank}"
        return lines(f"{who} of {self.world} is lost", f"reason   {self.reason}")
