"""What an explanation says of each layer: kernel format, kernels, and the reasons against the others."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from qload.listing.report_base import Answer

if TYPE_CHECKING:
    from qload.plan.kernels import KernelChoice


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
class Explanation(Answer):
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
