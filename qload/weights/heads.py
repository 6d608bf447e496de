"""Heads of attention among ranks: loads that keep them whole, and a refusal of those that would not."""

from collections.abc import Sequence
from typing import Protocol

from qload.architecture import Architecture
from qload.loader import Heads, TensorSource, WeightsLoader
from qload.spec import Weight


class _Holder(TensorSource, Protocol):
    """What `Weights` is here."""

    prefix: str | None
    architecture: Architecture | None

    @property
    def loader(self) -> WeightsLoader: ...


def load_heads(weights: _Holder, prefixes: Sequence[str], heads: Heads) -> Weight:
    """This rank's whole heads of each layer, joined along N; DivideError on every rank where it has none."""
    layers = [(prefix, weights.loader.shape(weights, prefix)[0]) for prefix in prefixes]
    return weights.loader.load(weights, heads.parts(layers, weights.process_group.size()), "N")


def check_heads(weights: _Holder, prefixes: Sequence[str]) -> None:
    """DivideError, on every rank, where equal shares would end inside of a head that the config tells of."""
    if weights.architecture is None:
        return
    for prefix in prefixes:
        names = (prefix, f"{weights.prefix}.{prefix}") if weights.prefix else (prefix,)
        known = next(filter(None, map(weights.architecture.heads, names)), None)
        if known is not None:
            known.check_equal_shares(prefix, weights.process_group.size())
