"""What a comparison of two checkpoints says: of each layer and tensor whether it means the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal

from qload.listing.report_base import LayerReportBase
from qload.verify.report import Report, reason_of, refused_path

Outcome = Literal["bits", "rounded", "differs", "shape", "missing", "refused", "unread"]
SAME = ("bits", "rounded")


@dataclass(frozen=True)
class LayerDiff:
    """A layer, or a tensor of none, in two checkpoints.

    Attributes
    ----------
    name
        In the first checkpoint, or where it is in the second alone, there.
    other
        In the second one; None: it is not there.
    outcome
        "bits": each value is the same, bit by bit, in float32; "rounded": after one rounding to the narrower
        of two float types, and zeros of any sign; "differs"; "shape": of other sizes; "missing": in one of
        both alone; "refused": damaged in one of both; "unread": no format reads it in one of both.
    detail
        Where it differs first, in how many places, and what mistake that would be; or "".
    differing, total
        Values that differ, and all.
    """

    name: str
    other: str | None
    outcome: Outcome
    detail: str = ""
    differing: int = 0
    total: int = 0

    @property
    def same(self) -> bool:
        """Whether both mean the same."""
        return self.outcome in SAME


@dataclass(frozen=True)
class CheckpointDiff(LayerReportBase):
    """Two checkpoints, layer by layer.

    Attributes
    ----------
    path, other
        The two.
    layers
        Every layer and tensor of either.
    unreadable
        Why one of both cannot be read; "" where both can.
    unsupported
        The unsupported format of either, with its remedy; "" if there is none.
    """

    path: str
    other: str
    layers: Sequence[LayerDiff] = ()
    unreadable: str = ""
    unsupported: str = ""

    def _sound(self) -> bool:
        """Return whether all layers and tensors that are read have equal values."""
        return all(layer.same or layer.outcome == "unread" for layer in self.layers)

    def _incomplete(self) -> bool:
        """Return whether either checkpoint has unread tensors."""
        return any(layer.outcome == "unread" for layer in self.layers)


def refused_paths(path: str | PathLike[str], other: str | PathLike[str]) -> CheckpointDiff | None:
    """Report of two paths of which one has no checkpoint, from the names of files; None if both have one."""
    refused = refused_path(path) or refused_path(other)
    return None if refused is None else unreadable(str(path), str(other), refused)


def unreadable(path: str, other: str, refused: Report) -> CheckpointDiff:
    """Report without comparison: the checkpoint of `refused`, one of the two, cannot be read."""
    reason = reason_of(refused.findings)
    if reason["unsupported"]:
        return CheckpointDiff(path, other, unsupported=f"{refused.path}: {reason['unsupported']}")
    return CheckpointDiff(path, other, unreadable=f"{refused.path}: {reason['unreadable']}")
