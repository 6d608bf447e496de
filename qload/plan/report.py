"""Reports of `plan` and `explain`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from qload.checkpoint.report_base import ReportBase
from qload.errors import QloadError

if TYPE_CHECKING:
    from qload.plan.kernels import KernelChoice
    from qload.plan.rank_counts import LawfulRanks


@dataclass(frozen=True)
class Alternative:
    """Other way to share a layer that cannot be cut into equal shares.

    Attributes
    ----------
    kind
        "uneven": shares of whole groups or blocks, with a smaller last share. "padded": zeros are appended
        until all shares are equal. "copied": every rank has all key and value heads. "whole": every rank has
        the complete layer.
    text
        Description of the share of each rank.
    bytes
        Stored bytes of the largest share beyond an equal share.
    """

    kind: Literal["uneven", "padded", "copied", "whole"]
    text: str
    bytes: int


@dataclass(frozen=True)
class LayerShare:
    """Result for one layer and one number of ranks.

    Attributes
    ----------
    bytes
        Stored bytes per rank; empty if the layer cannot be shared.
    error
        The error of a load; None if the layer can be shared.
    alternatives
        Other ways to share the layer, in ascending order of their cost.
    kernel
        Why the requested kernel format cannot hold a rank's share; "" if it can, or if none was requested.
    """

    bytes: tuple[int, ...] = ()
    error: QloadError | None = None
    alternatives: tuple[Alternative, ...] = ()
    kernel: str = ""

    @property
    def fits(self) -> bool:
        """Return whether every rank can load its share, and the kernel format can hold it."""
        return self.error is None and not self.kernel

    @property
    def reason(self) -> str:
        """Reason of the load or of the kernel format; "" if the layer fits."""
        return self.kernel if self.error is None else str(self.error)


@dataclass(frozen=True)
class PlannedLayer:
    """Result for one layer.

    Attributes
    ----------
    prefix
        Prefix of the layer's tensors.
    format
        Checkpoint format; None for a layer that cannot be read.
    shape
        (N, K), or (N,) for a vector.
    cut
        Axis of the cut. "N": outputs; "K": inputs; "experts": whole experts are distributed; "whole": every
        rank has the complete layer.
    shares
        Results by number of ranks.
    """

    prefix: str
    format: str | None
    shape: tuple[int, ...]
    cut: Literal["N", "K", "experts", "whole"]
    shares: Mapping[int, LayerShare]


@dataclass(frozen=True)
class WorldPlan:
    """Result for the whole checkpoint and one number of ranks.

    Attributes
    ----------
    fits
        Whether every layer fits.
    refused
        Number of layers that do not fit.
    reason
        Reason of the first of them in load order; "" if all fit.
    bytes
        Stored bytes of all weights per rank, without the layers that do not fit.
    """

    fits: bool
    refused: int
    reason: str
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class ShardingPlan(ReportBase):
    """Report of `plan`.

    Attributes
    ----------
    path
        The checkpoint.
    layers
        All layers in alphabetical order.
    worlds
        Results for the whole checkpoint, by number of ranks.
    model
        The `model_type` whose model in qload defines the cuts; None: names of layers define them.
    lawful
        Numbers of ranks that suit every layer; None if all of `worlds` fit, or if no number suits all layers.
    notes
        Limits of the result.
    unread
        The reason, by name, of tensors that no format reads; layers and bytes are without them.
    unreadable
        Why the checkpoint cannot be read; "" if it can.
    unsupported
        The known but unsupported format of the checkpoint, with a remedy; "" otherwise.
    """

    path: str
    layers: Sequence[PlannedLayer] = ()
    worlds: Mapping[int, WorldPlan] = field(default_factory=dict)
    model: str | None = None
    notes: Sequence[str] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    unreadable: str = ""
    unsupported: str = ""
    lawful: "LawfulRanks | None" = None

    def _sound(self) -> bool:
        """Return whether every layer fits for every number of ranks."""
        return all(world.fits for world in self.worlds.values())

    def _data(self) -> dict[str, Any]:
        """Return the fields, with numbers of ranks as text."""
        return {
            "model": self.model,
            "unread": dict(self.unread),
            "unreadable": self.unreadable,
            "unsupported": self.unsupported,
            "notes": list(self.notes),
            "lawful": None if self.lawful is None else asdict(self.lawful),
            "worlds": {str(ranks): asdict(world) for ranks, world in self.worlds.items()},
            "layers": [
                {
                    "prefix": layer.prefix,
                    "format": layer.format,
                    "shape": layer.shape,
                    "cut": layer.cut,
                    "shares": {str(ranks): _share_data(share) for ranks, share in layer.shares.items()},
                }
                for layer in self.layers
            ],
        }


def _share_data(share: LayerShare) -> dict[str, Any]:
    data = {"fits": share.fits, "bytes": share.bytes}
    if share.fits:
        return data
    return {**data, "reason": share.reason, "alternatives": [asdict(option) for option in share.alternatives]}


@dataclass(frozen=True)
class ExplainedLayer:
    """Kernel format and kernels of one layer.

    Attributes
    ----------
    prefix
        Prefix of the layer's tensors.
    format
        Checkpoint format; None for a layer that cannot be read.
    shape
        (N, K) of the share of rank 0 if the layer is repacked, else of the whole layer; (N,) for a vector.
    kernel_format
        Format after the load; the checkpoint format if the layer is not repacked.
    formats
        For each other kernel format, by name, the reason against it.
    choices
        The kernel for each number of tokens.
    changes
        Dtypes of activations with which kernels of qload would run; empty if they run already.
    error
        Why the layer cannot be loaded, and then there is no choice; "" otherwise.
    bits
        Bits of a code; None for a format without one width.
    """

    prefix: str
    format: str | None
    shape: tuple[int, ...]
    kernel_format: str | None = None
    formats: Mapping[str, str] = field(default_factory=dict)
    choices: "tuple[KernelChoice, ...]" = ()
    changes: tuple[str, ...] = ()
    error: str = ""
    bits: int | None = None


@dataclass(frozen=True)
class Explanation(ReportBase):
    """Report of `explain`.

    Attributes
    ----------
    path
        The checkpoint.
    arch
        The chip: "cpu", or a name such as "sm90".
    tp
        Number of ranks.
    dtype
        Dtype of the activations, by name.
    layers
        All layers in alphabetical order.
    notes
        Limits of the result.
    unread
        The reason, by name, of tensors that no format reads; `layers` is without them.
    unreadable
        Why the checkpoint cannot be read; "" if it can.
    unsupported
        The known but unsupported format of the checkpoint, with a remedy; "" otherwise.
    """

    path: str
    arch: str = ""
    tp: int = 1
    dtype: str = ""
    layers: Sequence[ExplainedLayer] = ()
    notes: Sequence[str] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    unreadable: str = ""
    unsupported: str = ""

    def _sound(self) -> bool:
        """Return whether every layer can be loaded."""
        return not any(layer.error for layer in self.layers)

    def _data(self) -> dict[str, Any]:
        """Return the fields; a choice without a measurement has `seconds` null and `basis` ""."""
        return asdict(self)
