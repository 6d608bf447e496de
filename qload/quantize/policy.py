"""Policies that select the plain layers to quantize while loading.

    QuantizingLoader(inner, Fp8Quantizer(), policy=mlp_only(blocks=32))

Layers that a checkpoint stores quantized stay unchanged. The inner loader loads excluded layers, with all of
its settings.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from qload.errors import ArgumentError
from qload.loader.exclusion import Exclusions

# Projections of the MLP in Llama, Mixtral and earlier models; attention has a `c_proj` as well.
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "c_fc", "mlp.c_proj")
# Routers of experts and gates of shared experts: the ends of their names in the architecture tables.
ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "mlp.router", "feed_forward.router", "mlp.shared_expert_gate")
BLOCK_LISTS = ("layers", "h", "blocks")  # name segments before the number of a block


@runtime_checkable
class Policy(Protocol):
    """Selection of plain layers by prefix alone, so that all ranks agree."""

    def quantizes(self, prefix: str) -> bool:
        """Return whether the layer stored under `prefix` is quantized."""


@dataclass(frozen=True)
class Modules:
    """Policy by names: the layers of `only` (empty: all) except those of `without`.

    Attributes
    ----------
    only, without
        Consecutive whole segments of a dotted name, as in `modules_to_not_convert`.
    plain_blocks
        Numbers of decoder blocks that stay plain.
    """

    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    plain_blocks: frozenset[int] = frozenset()

    def quantizes(self, prefix: str) -> bool:
        """Return whether the layer `prefix` is selected by name and by block."""
        if self.only and Exclusions(self.only, "only").entry(prefix) is None:
            return False
        if Exclusions(self.without, "without").entry(prefix) is not None:
            return False
        return block_of(prefix) not in self.plain_blocks


def mlp_only(*, blocks: int | None = None, first_and_last: bool = True) -> Modules:
    """Return the policy for FP8 in Llama-like models, which selects the projections of the MLP.

    With `first_and_last` False, the first and the last of `blocks` decoder blocks stay plain, as their errors
    cost most accuracy. ArgumentError for `blocks` below 1, and for None with `first_and_last` False.
    """
    counted = type(blocks) is int and blocks >= 1
    if not counted and (blocks is not None or not first_and_last):
        expected = "the number of decoder blocks, of which the last stays plain"
        raise ArgumentError("blocks", expected, repr(blocks))
    if first_and_last or blocks is None:
        return Modules(MLP)
    return Modules(MLP, plain_blocks=frozenset({0, blocks - 1}))


def is_router(prefix: str) -> bool:
    """Return whether the layer `prefix` routes tokens to experts; such a layer stays in its stored type."""
    return f".{prefix}".endswith(tuple(f".{name}" for name in ROUTERS))


def block_of(prefix: str) -> int | None:
    """Return the number of the decoder block in `prefix`, or None: `model.layers.12.mlp.up_proj` -> 12."""
    segments: Sequence[str] = prefix.split(".")
    for name, number in itertools.pairwise(segments):
        if name in BLOCK_LISTS and number.isascii() and number.isdigit():
            return int(number)
    return None
