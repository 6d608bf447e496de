"""Report of `diff`: the outcome of each layer and tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from qload.checkpoint.report_base import LayerReportBase
from qload.verify.report import Report, reason_of, refused_path

Outcome = Literal["bits", "rounded", "differs", "shape", "missing", "refused", "unread"]
EQUAL_OUTCOMES = ("bits", "rounded")


@dataclass(frozen=True)
class LayerDiff:
    """Comparison of one layer, or of one tensor outside of layers.

    Attributes
    ----------
    name
        Name in the first checkpoint; in the second one for a layer of the second checkpoint alone.
    other
        Name in the second checkpoint; None if the layer is missing there.
    outcome
        "bits": every value is equal in float32, bit for bit. "rounded": every value is equal after one
        rounding to the narrower of two float types, zeros of either sign included. "differs": some value is
        not equal. "shape": the shapes differ. "missing": one checkpoint has no such layer. "refused": the
        layer cannot be read in one checkpoint. "unread": no format reads it in one checkpoint.
    detail
        The first difference, the number of differences, and the fault that would cause them; "" otherwise.
    differing, total
        Number of values that differ, and of all values.
    """

    name: str
    other: str | None
    outcome: Outcome
    detail: str = ""
    differing: int = 0
    total: int = 0

    @property
    def same(self) -> bool:
        """Return whether all values are equal."""
        return self.outcome in EQUAL_OUTCOMES


@dataclass(frozen=True)
class CheckpointDiff(LayerReportBase):
    """Report of `diff`.

    Attributes
    ----------
    path, other
        The two checkpoints.
    layers
        Every layer and tensor of either checkpoint.
    unreadable
        Why one of them cannot be read; "" if both can.
    unsupported
        The known but unsupported format of one of them, with a remedy; "" otherwise.
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
    """Return the report for paths without a checkpoint, by the names of files; None if both have one."""
    refused = refused_path(path) or refused_path(other)
    return None if refused is None else unreadable(str(path), str(other), refused)


def unreadable(path: str, other: str, refused: Report) -> CheckpointDiff:
    """Return the report without a comparison, for a checkpoint that cannot be read according to `refused`."""
    reason: dict[str, Any] = {
        field: f"{refused.path}: {text}" for field, text in reason_of(refused.findings).items()
    }
    return CheckpointDiff(path, other, **reason)
