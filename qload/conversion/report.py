"""What a conversion came to: of each layer what it became, and whether it still means the same."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qload.listing.report_base import AnswerByLayer
from qload.verify.report import Finding

Became = Literal["bits", "rounded", "differs", "refused"]
WELL = ("bits", "rounded")


@dataclass(frozen=True)
class ConvertedLayer:
    """A layer, or a tensor of none, and what became of it.

    Attributes
    ----------
    name
        Of the layer's tensors, without their last parts; of a tensor of no layer, the whole.
    source, format
        The formats that it was read in and was written in; None of a tensor of no layer.
    outcome
        What the files that were written say beside those that were read: "bits": each value is the same, bit
        by bit; "rounded": after one rounding to the type that was asked for; "differs". "refused": the target
        cannot say it, and nothing was written.
    detail
        Where it differs, or why it was refused; or "".
    """

    name: str
    source: str | None
    format: str | None
    outcome: Became
    detail: str = ""

    @property
    def well(self) -> bool:
        """Whether it means what it did."""
        return self.outcome in WELL


@dataclass(frozen=True)
class WrittenCheckpoint(AnswerByLayer):
    """A base of what says of a checkpoint's layers, when it was written again, what became of each."""

    path: str
    folder: str = ""

    @property
    @abstractmethod
    def notes(self) -> Sequence[str]:
        """What there is to say of all."""

    @property
    @abstractmethod
    def layers(self) -> Sequence[Any]:
        """Each with a `name`, an `outcome`, a `detail`, and whether that is `well`."""

    def _sound(self) -> bool:
        """Whether all was written, and is well."""
        return all(layer.well for layer in self.layers)


@dataclass(frozen=True)
class Conversion(WrittenCheckpoint):
    """A checkpoint that was written in another format, or why it was not.

    Attributes
    ----------
    path
        What was read.
    folder
        What was written; it is there only if the verdict is "ok".
    to
        The format that was asked for.
    layers
        All that were read; of what was refused, the refused ones.
    notes
        What the target says no more, and what was left out.
    findings
        Errors that the header tier of `verify` reports of what was read; then nothing was written.
    unreadable
        Why the checkpoint cannot be read; "" where it can.
    unsupported
        The format of the checkpoint, where that is known and not read, with the way out; else "".
    """

    to: str = ""
    layers: Sequence[ConvertedLayer] = ()
    notes: Sequence[str] = ()
    findings: Sequence[Finding] = ()
    unreadable: str = ""
    unsupported: str = ""

    def _sound(self) -> bool:
        """Whether headers have no errors, and all was written and is well."""
        return not self.findings and super()._sound()
