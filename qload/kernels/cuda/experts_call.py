"""What the kernels of experts know of a call: the stacked matrices, who chose whom, and the activation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qload.devices.tensors import address as pointer
from qload.layouts import strips

GATES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of each of E experts in strips, stacked; `group_size` -1: one scale a column.

    `N`, `K`: outputs and inputs, which may be padded in the tensors. `perm`: the input of each row, of act
    order; rows that no input has come last.
    """

    weights: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    bias: Tensor | None
    N: int
    K: int
    bits: int
    group_size: int

    @property
    def experts(self) -> int:
        """E, of those that are here."""
        return self.weights.shape[0]

    @property
    def rows(self) -> int:
        """K as it is padded."""
        return self.weights.shape[2] // (2 * self.bits)

    @property
    def columns(self) -> int:
        """N as it is padded."""
        return self.weights.shape[1] * strips.TILE_N

    @property
    def group(self) -> int:
        """Rows of a group."""
        return self.rows if self.group_size == -1 else self.group_size

    @property
    def moves_inputs(self) -> bool:
        """Whether x has to be laid in the order of the rows first."""
        return self.perm is not None or self.rows != self.K


@dataclass(frozen=True)
class ExpertsCall:
    """x (M, H), ids and weights (M, top) of the experts that each token chose, and the experts' matrices.

    `map`: the place of each of all experts among those here, -1: it is elsewhere; None: all are here.
    `gate`: its number in `GATES`, alpha and limit. `weighs_inputs`: weights multiply x, not the result.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    map: Tensor | None
    gate_up: ExpertMatrix
    down: ExpertMatrix
    gate: tuple[int, float, float]
    weighs_inputs: bool
    early: bool = True

    @property
    def tokens(self) -> int:
        """M."""
        return self.x.shape[0]

    @property
    def top(self) -> int:
        """How many experts a token chooses."""
        return self.ids.shape[1]

    @property
    def pairs(self) -> int:
        """Tokens times choices."""
        return self.ids.numel()

    @property
    def total(self) -> int:
        """Experts on all ranks."""
        return self.down.experts if self.map is None else self.map.numel()

    @property
    def counts(self) -> list[int]:
        """Pairs, all experts, and those that are here."""
        return [self.pairs, self.total, self.down.experts]

    def choice(self, rows: Tensor | None = None) -> list[int]:
        """As routines take it: who chose whom, and of which pair rows are, or which rows pairs have."""
        return [pointer(self.ids), pointer(self.map), pointer(rows)]

    @property
    def wide(self) -> bool:
        """Whether ids have 64 bits."""
        return self.ids.dtype == torch.int64

    @property
    def in_bfloat16(self) -> bool:
        """Whether x is bfloat16, not float16."""
        return self.x.dtype == torch.bfloat16
