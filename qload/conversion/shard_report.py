"""What a checkpoint in shares came to: how ranks share each layer, and whether they have what they load."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qload.conversion.report import WrittenCheckpoint


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
