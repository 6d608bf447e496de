"""Who is quantized while loading: a policy is an object, and no model hard-codes one.

    QuantizingLoader(inner, Fp8Quantizer(), policy=mlp_only(blocks=32))

A policy only says which plain layers are quantized. What a checkpoint stores quantized is never touched,
and what a policy leaves out is loaded by the inner loader as it is, with all of its settings.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from qload.errors import ArgumentError
from qload.loader.exclusion import Exclusions

# As Llama, Mixtral and the models before them call these; attention has a `c_proj` too.
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "c_fc", "mlp.c_proj")
# Who chooses experts, or weighs a shared one: the ends of the names that the architecture tables have for it.
ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "mlp.router", "feed_forward.router", "mlp.shared_expert_gate")
BLOCKS = ("layers", "h", "blocks")  # the segment before a block's number


@runtime_checkable
class Policy(Protocol):
    """Says of a plain layer whether it is quantized.

    An implementer promises that the answer follows from the prefix alone, so that all ranks agree.
    """

    def quantizes(self, prefix: str) -> bool:
        """Whether the layer stored under `prefix` is."""


@dataclass(frozen=True)
class Modules:
    """Layers by name: those of `only` (empty: all) without those of `without`, by whole segments.

    Attributes
    ----------
    only, without
        Runs of whole segments of a dotted name, as in `modules_to_not_convert`.
    plain_blocks
        Numbers of decoder blocks that stay plain.
    """

    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    plain_blocks: frozenset[int] = frozenset()

    def quantizes(self, prefix: str) -> bool:
        """Whether the names and the block of the layer `prefix` let it be quantized."""
        if self.only and Exclusions(self.only, "only").entry(prefix) is None:
            return False
        if Exclusions(self.without, "without").entry(prefix) is not None:
            return False
        return block_of(prefix) not in self.plain_blocks


def mlp_only(*, blocks: int | None = None, first_and_last: bool = True) -> Modules:
    """The policy for FP8 in Llama-like models: the projections of the MLP, and nothing else.

    `first_and_last` False: those of the first and the last of `blocks` decoder blocks stay plain too, as
    they hurt most. One block is both. ArgumentError for `blocks` below 1, and for None where it is needed.
    """
    counted = type(blocks) is int and blocks >= 1
    if not counted and (blocks is not None or not first_and_last):
        expected = "the number of decoder blocks, as the last one stays plain"
        raise ArgumentError("blocks", expected, repr(blocks))
    if first_and_last or blocks is None:
        return Modules(MLP)
    return Modules(MLP, plain_blocks=frozenset({0, blocks - 1}))


def is_router(prefix: str) -> bool:
    """Whether the layer `prefix` chooses the experts of a token, and stays in the type it is stored in."""
    return f".{prefix}".endswith(tuple(f".{name}" for name in ROUTERS))


def block_of(prefix: str) -> int | None:
    """The number of the decoder block that `prefix` is of: `model.layers.12.mlp.up_proj` -> 12; or None."""
    segments: Sequence[str] = prefix.split(".")
    for name, number in itertools.pairwise(segments):
        if name in BLOCKS and number.isascii() and number.isdigit():
            return int(number)
    return None
