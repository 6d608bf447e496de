"""Reports of `convert` and `shard`: the outcome of each layer."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qload.checkpoint.report_base import LayerReportBase
from qload.verify.report import Finding

ConversionOutcome = Literal["bits", "rounded", "differs", "refused"]


@dataclass(frozen=True)
class ConvertedLayer:
    """Outcome of one layer, or of one tensor outside of layers.

    Attributes
    ----------
    name
        Prefix of the layer's tensors; for a tensor outside of layers, its full name.
    source, format
        Formats before and after the conversion; None for a tensor outside of layers.
    outcome
        Comparison of the output with the source. "bits": every value is equal, bit for bit. "rounded": every
        value is equal after one rounding to the requested type. "differs": some value is not equal.
        "refused": the target cannot represent the layer, and no file was written.
    detail
        The first difference, or the reason of the refusal; "" otherwise.
    """

    name: str
    source: str | None
    format: str | None
    outcome: ConversionOutcome
    detail: str = ""

    @property
    def well(self) -> bool:
        """Return whether the output has the values of the source."""
        return self.outcome in ("bits", "rounded")


@dataclass(frozen=True)
class ShardedLayer:
    """Outcome of one layer, or of one tensor outside of layers.

    Attributes
    ----------
    name
        Prefix of the layer's tensors; for a tensor outside of layers, its full name.
    format
        Format of the layer, in the source and in every share; None for a tensor outside of layers.
    cut
        Axis of the cut. "N": outputs; "K": inputs; "experts": whole experts are distributed; "whole": every
        rank has the complete layer.
    outcome
        "bits": each folder has exactly the share that its rank loads from the source. "differs": some folder
        does not. "refused": the layer cannot be shared this way, and no file was written.
    detail
        The difference, or the reason of the refusal; "" otherwise.
    """

    name: str
    format: str | None
    cut: Literal["N", "K", "experts", "whole"]
    outcome: Literal["bits", "differs", "refused"]
    detail: str = ""

    @property
    def well(self) -> bool:
        """Return whether each folder has the share that its rank loads."""
        return self.outcome == "bits"


@dataclass(frozen=True)
class WrittenCheckpoint(LayerReportBase):
    """Base of the reports about a new checkpoint, layer by layer."""

    path: str
    folder: str = ""

    @property
    @abstractmethod
    def notes(self) -> Sequence[str]:
        """Remarks about the whole checkpoint."""

    @property
    @abstractmethod
    def layers(self) -> Sequence[Any]:
        """Layers, each with `name`, `outcome`, `detail` and `well`."""

    def _sound(self) -> bool:
        """Return whether every layer has the values of the source, possibly rounded on request."""
        return all(layer.well for layer in self.layers)


@dataclass(frozen=True)
class Conversion(WrittenCheckpoint):
    """Report of `convert`.

    Attributes
    ----------
    path
        The source checkpoint.
    folder
        The output folder; "" unless the verdict is "ok".
    to
        The requested format; "" if the formats stay.
    layers
        All layers; after a refusal, the refused layers alone.
    notes
        Properties of the source that the target cannot represent, and tensors that were left out.
    findings
        Errors of the source in the header tier of `verify`; if there are any, no file was written.
    unreadable
        Why the checkpoint cannot be read; "" if it can.
    unsupported
        The known but unsupported format of the checkpoint, with a remedy; "" otherwise.
    """

    to: str = ""
    layers: Sequence[ConvertedLayer] = ()
    notes: Sequence[str] = ()
    findings: Sequence[Finding] = ()
    unreadable: str = ""
    unsupported: str = ""

    def _sound(self) -> bool:
        """Return whether the headers have no errors and every layer has the values of the source."""
        return not self.findings and super()._sound()


@dataclass(frozen=True)
class ShardedCheckpoint(WrittenCheckpoint):
    """Report of `shard`.

    Attributes
    ----------
    path
        The source checkpoint.
    folder
        The output folder, with `rank-0`, `rank-1` and so on; "" unless the verdict is "ok".
    tp
        Number of ranks.
    ep
        Number of groups of ranks over which whole experts are distributed; None: every expert is cut among
        all ranks.
    layers
        All layers; after a refusal, the refused layers alone.
    notes
        Properties of the folders that their files do not state.
    unreadable
        Why the checkpoint cannot be read; "" if it can.
    unsupported
        The known but unsupported format of the checkpoint, with a remedy; "" otherwise.
    """

    tp: int = 1
    ep: int | None = None
    layers: Sequence[ShardedLayer] = ()
    notes: Sequence[str] = ()
    unreadable: str = ""
    unsupported: str = ""
