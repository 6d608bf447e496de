"""Reports of `convert` and `shard`: the outcome of each layer."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qload.listing.report_base import LayerReportBase
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
class WrittenCheckpoint(LayerReportBase):
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


@dataclass(frozen=True)
class ShardedLayer:
    """A layer, or a tensor of none, and what became of it.

    Attributes
    ----------
    name
        Of the layer's tensors, without their last parts; of a tensor of no layer, the whole.
    format
        In which it is stored, in shares as before; None of a tensor of no layer.
    cut
        Along what ranks cut it: "N", its outputs; "K", its inputs; "experts", whole ones of a layer; "whole":
        every rank has all of it.
    outcome
        "bits": what each folder holds is what its rank loads of the whole, bit by bit; "differs". "refused":
        it cannot be shared so, and nothing was written.
    detail
        Where it differs, or why it was refused; or "".
    """

    name: str
    format: str | None
    cut: Literal["N", "K", "experts", "whole"]
    outcome: Literal["bits", "differs", "refused"]
    detail: str = ""

    @property
    def well(self) -> bool:
        """Whether each rank has what it loads."""
        return self.outcome == "bits"


@dataclass(frozen=True)
class ShardedCheckpoint(WrittenCheckpoint):
    """A checkpoint that was written in shares, one folder a rank, or why it was not.

    Attributes
    ----------
    path
        What was read.
    folder
        What was written, `rank-0` and so on in it; it is there only if the verdict is "ok".
    tp, ep
        Among how many ranks, and into how many runs of them experts are shared out, None: they are cut.
    layers
        All that were read; of what was refused, the refused ones.
    notes
        What the folders do not say.
    unreadable
        Why the checkpoint cannot be read; "" where it can.
    unsupported
        The format of the checkpoint, where that is known and not read, with the way out; else "".
    """

    tp: int = 1
    ep: int | None = None
    layers: Sequence[ShardedLayer] = ()
    notes: Sequence[str] = ()
    unreadable: str = ""
    unsupported: str = ""
