"""Reports of `plan` and `explain`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from qload.errors import QloadError
from qload.listing.report_base import ReportBase

if TYPE_CHECKING:
    from qload.plan.kernels import KernelChoice
    from qload.plan.rank_counts import LawfulRanks

Kind = Literal["uneven", "padded", "copied", "whole"]


@dataclass(frozen=True)
class Alternative:
    """A lawful way to share a layer that equal shares are no way for.

    Attributes
    ----------
    kind
        "uneven": shares of whole groups or blocks, the last of what is left; "padded": as many zeros as make
        all shares equal; "copied": all key and value heads on every rank; "whole": all of it on every rank.
    text
        What each rank then has.
    bytes
        What the fullest rank holds more than an equal share of the stored bytes.
    """

    kind: Kind
    text: str
    bytes: int


@dataclass(frozen=True)
class LayerShare:
    """A layer among so many ranks.

    Attributes
    ----------
    bytes
        Of the layer as it is stored, what each rank holds; () where it cannot be shared.
    error
        What a load raises; None: it fits.
    alternatives
        What can be done instead, the cheapest first.
    kernel
        Why the kernel that was asked for cannot take a rank's share; "": it can, or none was asked for.
    """

    bytes: tuple[int, ...] = ()
    error: QloadError | None = None
    alternatives: tuple[Alternative, ...] = ()
    kernel: str = ""

    @property
    def fits(self) -> bool:
        """Whether every rank can load its share, and the kernel takes it."""
        return self.error is None and not self.kernel

    @property
    def reason(self) -> str:
        """Why it does not fit, as the load or the kernel says it; "" where it does."""
        return self.kernel if self.error is None else str(self.error)


@dataclass(frozen=True)
class PlannedLayer:
    """A layer, and what becomes of it among several numbers of ranks.

    Attributes
    ----------
    prefix
        What it is stored under.
    format
        Of its checkpoint; None of a layer that cannot be read.
    shape
        (N, K), or (N,) of a vector.
    cut
        Along what ranks cut it: "N", its outputs; "K", its inputs; "experts", whole ones of a layer; "whole":
        every rank has all of it.
    shares
        By the number of ranks.
    """

    prefix: str
    format: str | None
    shape: tuple[int, ...]
    cut: Literal["N", "K", "experts", "whole"]
    shares: Mapping[int, LayerShare]


@dataclass(frozen=True)
class WorldPlan:
    """A checkpoint among so many ranks.

    Attributes
    ----------
    fits
        Whether each layer does.
    refused
        How many layers do not.
    reason
        Why the first of them does not, in the order in which a model is loaded; "" where all do.
    bytes
        What each rank holds of all weights as they are stored, without the layers that do not fit.
    """

    fits: bool
    refused: int
    reason: str
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class ShardingPlan(ReportBase):
    """Among how many ranks a checkpoint can be shared, told before any weight is read.

    Attributes
    ----------
    path
        The checkpoint.
    layers
        All of them, in the order of their names.
    worlds
        By the number of ranks.
    model
        The `model_type` that qload itself runs, whose own cuts these are; None: those that are usual by the
        names of layers.
    lawful
        Numbers of ranks that suit every layer; None if all of `worlds` fit, or no number suits all.
    notes
        What is not counted, and what is not known.
    unread
        The reason, by name, of tensors that no format reads: their layers and bytes are not counted.
    unreadable
        Why the checkpoint cannot be read; "" where it can.
    unsupported
        The format of the checkpoint, where that is known and not read, with the way out; else "".
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
        """Whether all fits for each number of ranks."""
        return all(world.fits for world in self.worlds.values())

    def _data(self) -> dict[str, Any]:
        """The fields; numbers of ranks are text."""
        return {
            "model": self.model,
            "unread": dict(self.unread),
            "unreadable": self.unreadable,
            "unsupported": self.unsupported,
            "notes": list(self.notes),
            "lawful": None if self.lawful is None else asdict(self.lawful),
            "worlds": {str(ranks): asdict(world) for ranks, world in self.worlds.items()},
            "layers": [_layer(layer) for layer in self.layers],
        }


def _layer(layer: PlannedLayer) -> dict[str, Any]:
    shares = {str(ranks): _share(share) for ranks, share in layer.shares.items()}
    return {
        "prefix": layer.prefix,
        "format": layer.format,
        "shape": layer.shape,
        "cut": layer.cut,
        "shares": shares,
    }


def _share(share: LayerShare) -> dict[str, Any]:
    told = {"fits": share.fits, "bytes": share.bytes}
    if share.fits:
        return told
    return {**told, "reason": share.reason, "alternatives": [asdict(each) for each in share.alternatives]}


@dataclass(frozen=True)
class ExplainedLayer:
    """A layer, and what multiplies it.

    Attributes
    ----------
    prefix
        What it is stored under.
    format
        Of the checkpoint; None of a layer that cannot be read.
    shape
        (N, K) of the first rank's share where it is repacked, of the whole layer elsewhere; (N,) of a vector.
    kernel_format
        What it is repacked to; that of the checkpoint where it stays.
    formats
        Why it is not repacked to each other kernel format, by name.
    choices
        What multiplies each number of tokens.
    changes
        Of what else qload's own kernels would take it, where they do not.
    error
        Why it cannot be loaded so, or ""; then nothing is chosen.
    bits
        Of a code; None of what has none of one width.
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
    """Which kernel multiplies each layer of a checkpoint, and why.

    Attributes
    ----------
    path
        The checkpoint.
    arch
        The chip: "cpu", or such as "sm90".
    tp
        Among how many ranks.
    dtype
        Of the activations, by name.
    layers
        All of them, in the order of their names.
    notes
        Where the answers end.
    unread
        The reason, by name, of tensors that no format reads; their layers are not among these.
    unreadable
        Why the checkpoint cannot be read; "" where it can.
    unsupported
        The format of the checkpoint, where that is known and not read, with the way out; else "".
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
        """Whether each layer can be loaded so."""
        return not any(layer.error for layer in self.layers)

    def _data(self) -> dict[str, Any]:
        """The fields; `seconds` null and `basis` "": not measured."""
        return asdict(self)
