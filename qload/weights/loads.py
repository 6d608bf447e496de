"""A load as a value: what the typed loads of `Weights` are asked, said before any of it is done."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from qload.architecture import Architecture
from qload.errors import ArgumentError, check_fields
from qload.loader import Blocks, Heads, Part, Split, TensorSource, WeightsLoader, split_blocks
from qload.weights.heads import check_heads


@dataclass(frozen=True)
class Load:
    """One of the typed loads of `Weights`, to be handed to `Weights.stream`.

    ArgumentError for several layers along "K" or in blocks, and for heads or blocks along another split.

    Attributes
    ----------
    prefixes
        A prefix, or several whose layers are joined along N.
    split
        None: all on every rank, as `get_weights`; "N": this rank's outputs, as `get_weights_col` and
        `get_multi_weights_col`; "K": its inputs, as `get_weights_row`.
    heads
        Of attention, of which each rank gets whole ones; only along "N".
    block_sizes
        The blocks of one fused layer, as in `get_weights_col_packed`; only along "N".

    Examples
    --------
    >>> import torch
    >>> from qload import Load, MemoryStorage, Weights, loader_from_config
    >>> storage = MemoryStorage({"up.weight": torch.ones(4, 2), "down.weight": torch.ones(2, 4)})
    >>> weights = Weights(storage, loader=loader_from_config(None))
    >>> for load, weight in weights.stream([Load("up", "N"), Load("down", "K")]):
    ...     load.prefixes, weight.shape
    (('up',), (4, 2))
    (('down',), (2, 4))
    """

    prefixes: Sequence[str] | str
    split: Split | None = None
    heads: Heads | None = None
    block_sizes: Blocks | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        several = (self.prefixes,) if isinstance(self.prefixes, str) else tuple(self.prefixes)
        object.__setattr__(self, "prefixes", several)
        if not several or (len(several) > 1 and (self.split == "K" or self.block_sizes is not None)):
            raise ArgumentError("prefixes", 'one or more; one alone along "K" or in blocks', repr(several))
        told = self.heads is not None or self.block_sizes is not None
        if (told and self.split != "N") or (self.heads is not None and self.block_sizes is not None):
            expected = 'heads or block_sizes, one of them, along "N" alone'
            raise ArgumentError("split", expected, repr(self.split))


class LoadHolder(TensorSource, Protocol):
    """What `Weights` is here."""

    prefix: str | None
    architecture: Architecture | None

    @property
    def loader(self) -> WeightsLoader:
        """What serves the loads."""


def parts_of(weights: LoadHolder, loader: WeightsLoader, load: Load) -> list[Part]:
    """The parts of a load, as the typed load that it stands for has them; its errors too."""
    prefixes = load.prefixes
    if load.heads is not None:
        layers = [(prefix, loader.shape(weights, prefix)[0]) for prefix in prefixes]
        return load.heads.parts(layers, weights.process_group.size())
    if load.block_sizes is not None:
        prefix = prefixes[0]
        edges = [0]
        for size in split_blocks(prefix, "N", loader.shape(weights, prefix)[0], load.block_sizes):
            edges.append(edges[-1] + size)
        return [Part(prefix, a, b) for a, b in pairwise(edges)]
    if load.split == "N":
        check_heads(weights, prefixes)
    return [Part(prefix) for prefix in prefixes]
