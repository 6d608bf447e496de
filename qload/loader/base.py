"""The five loads every loader answers, all of them one: parts of layers, and what the ranks share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any, Literal

import torch

from qload.errors import ArgumentError, DivideError, checked
from qload.loader.description import ConfiguredFormat, LayerDescription
from qload.loader.source import LateElements, Rectangle, TensorSource
from qload.spec import Weight

Split = Literal["N", "K"]
Blocks = int | Iterable[int]


@dataclass(frozen=True)
class Part:
    """Outputs [start, stop) of the layer stored under a prefix; `stop` None: to the end.

    `copies`: how many ranks, one after another, hold the same share of these outputs. `short`: the last share
    may be short, as that of a vocabulary that the ranks do not divide.
    """

    prefix: str
    start: int = 0
    stop: int | None = None
    copies: int = 1
    short: bool = False


@dataclass(frozen=True)
class LoadPlan:
    """A load before any weight is read.

    `reads`: what it will ask for, as far as headers and facts tell, for who reads ahead. `finish` makes the
    weight from a source that has the same tensors. `late`: what `finish` takes from its file by itself, if
    nobody has begun to before.
    """

    reads: Sequence[Rectangle]
    finish: Callable[[TensorSource], Weight]
    late: Sequence[LateElements] = ()


class WeightsLoader(ABC):
    """Turns named tensors into a typed weight. A subclass says `load` and `shape`; the rest follows.

    An implementer promises to ask `weights` for no other high-level load, so that a loader which wraps a
    loader stays in charge whatever loader is installed. `config_tensors`: the names of tensors that were
    read as settings, and mean no weight. `formats`: what layers may be stored as. `describe`, `left_out` and
    `made` let layers be listed before any is read; a loader without `describe` lists none.
    """

    config_tensors: tuple[str, ...] = ()  # tensors that were read as settings, and mean no weight
    formats: tuple[ConfiguredFormat, ...] = ()

    @abstractmethod
    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """The `parts` joined along N: this rank's share along `split`, or all of them where it is None.

        `weights`: who holds the tensors, as `Weights` does.
        """

    def plan(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> LoadPlan:
        """The load of `parts` of `weights` along `split`, in two steps; of a loader that cannot tell, one."""
        return LoadPlan((), lambda source: self.load(source, parts, split))

    @abstractmethod
    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """(N, K) of the layer that `weights` has under `prefix`, from headers alone."""

    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """All that headers and facts tell about the layer `weights` has under `prefix`, as it is stored.

        ArgumentError of a loader that cannot tell.
        """
        raise ArgumentError("loader", f"one with describe(), to list {prefix}", type(self).__name__)

    def settle(self, weights: TensorSource, layer: LayerDescription) -> LayerDescription:
        """Complete the description of a `layer` of `weights` by its values, as `FormatLoader` does."""
        return layer

    def left_out(self, prefix: str) -> str | None:
        """Why the config leaves out the layer `prefix`, which entry of which key; None where it does not."""
        return None

    def made(self, layer: LayerDescription, device: torch.device) -> str | None:
        """The format that `layer` has after a load to `device`; None: the one that it is stored in.

        Told from its type: what the values forbid shows when they are read.
        """
        return None

    @checked
    def get_weights(self, weights: TensorSource, prefix: str) -> Weight:
        """The whole layer that `weights` has under `prefix`, the same on every rank."""
        return self.load(weights, [Part(prefix)], None)

    @checked
    def get_weights_col(self, weights: TensorSource, prefix: str) -> Weight:
        """This rank's outputs of the layer that `weights` has under `prefix`."""
        return self.load(weights, [Part(prefix)], "N")

    @checked
    def get_weights_row(self, weights: TensorSource, prefix: str) -> Weight:
        """This rank's inputs of the layer that `weights` has under `prefix`."""
        return self.load(weights, [Part(prefix)], "K")

    @checked
    def get_multi_weights_col(self, weights: TensorSource, prefixes: Sequence[str], dim: int = 0) -> Weight:
        """This rank's outputs of each layer that `weights` has under one of `prefixes`, joined along N.

        `dim`: 0 or -2, the only one there is; ArgumentError for another, and for no prefixes.
        """
        if dim not in (0, -2):
            raise ArgumentError("dim", "0: the parts of a fused layer join along N", str(dim))
        if isinstance(prefixes, str) or not prefixes:
            raise ArgumentError("prefixes", "one or more prefixes", repr(prefixes))
        return self.load(weights, [Part(prefix) for prefix in prefixes], "N")

    @checked
    def get_weights_col_packed(self, weights: TensorSource, prefix: str, block_sizes: Blocks) -> Weight:
        """This rank's outputs of each block of the fused layer (qkv, gate_up) under `prefix` of `weights`.

        `block_sizes`: how many equal blocks, or their sizes, or their proportions.
        """
        edges = [0]
        for size in split_blocks(prefix, "N", self.shape(weights, prefix)[0], block_sizes):
            edges.append(edges[-1] + size)
        parts = [Part(prefix, a, b) for a, b in pairwise(edges)]
        return self.load(weights, parts, "N")


def split_blocks(tensor: str, dim: int | str, total: int, blocks: Blocks) -> list[int]:
    """Block sizes that sum to `total`, from a count, from proportions, or from the sizes themselves."""
    asked: Any = blocks
    try:
        given, counted = list(asked), False
    except TypeError:  # a count of any integer type, or nothing that means blocks
        given, counted = [asked], True
    sizes = [_natural(size) for size in given]
    if not sizes or not all(sizes):
        raise ArgumentError(
            f"{tensor}: block_sizes",
            "a count, or one or more sizes or proportions: whole numbers, at least 1",
            f"{asked if counted else given!r:.80}",
        )
    if total % sum(sizes):
        ratio = " : ".join(map(str, sizes))
        parts = f"{sizes[0]} equal blocks" if counted else f"blocks in proportion {ratio}"
        raise DivideError(tensor, dim, total, parts)
    if counted:
        return [total // sizes[0]] * sizes[0]
    return [total // sum(sizes) * size for size in sizes]


def _natural(value: Any) -> int:
    """A whole number of at least 1, or 0 for what is none: no fraction, no text, no boolean."""
    try:
        return 0 if isinstance(value, bool) else max(0, index(value))
    except TypeError:
        return 0
