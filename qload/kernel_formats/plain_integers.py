"""Integer codes in plain order: what GPTQ, AWQ, ExLlama's, Marlin's and compressed-tensors' words all say.

Every layout of integer weights is read into this and written from it, so that none knows another. Nothing is
padded or permuted, and K need not fill words: whether it has to, the layout that is written says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from qload import devices, spec
from qload.layouts import Order, PackedCodes, Packing, Stored, ZeroPoints
from qload.spec import Layer, Weight


@dataclass(frozen=True)
class Origin(spec.Config):
    """What `restore` goes back to: a type of weight and its config, and what other layouts leave out.

    `index`: the dtype of the group index, None where there is none. `keeps_zeros`: zero points are stored
    that may be left out, and go along although all are 2**(bits - 1).
    """

    name: ClassVar[str] = "origin"

    weight_type: type[Weight]
    config: Any
    index: torch.dtype | None = None
    keeps_zeros: bool = False


@dataclass(frozen=True, eq=False)
class Integers:
    """w[k, n] = scales[g, n] * (codes[k, n] - zeros[g, n]),  g = g_idx[k]

    `unpack` makes the codes (K, N), which whoever only asks what fits does not need; `words` are they as
    GPTQ has them, where they were read as such. `group_size` is -1 for one group. `convention`: how zero
    points were stored. `whole`: the layer that this is a share of; where it is known, it decides what is
    refused or left out, so that every rank decides alike. `middle`: all zero points are known to be
    2**(bits - 1). `known_in_order`: rows and groups are known to follow each other. `out`: a weight whose
    large tensors are written to, by `writes`, which are left to be called when nothing can be refused any
    more.
    """

    bits: int
    group_size: int
    unpack: Callable[[], Tensor | devices.LazyCodes]
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    layer: Layer
    convention: ZeroPoints = field(default_factory=Stored)
    whole: "Integers | None" = None
    words: Tensor | None = None
    middle: bool = False
    known_in_order: bool = False
    out: Weight | None = None
    writes: list[Callable[[], object]] = field(default_factory=list)

    def packed(self, name: str, packing: Packing, codes: Tensor | devices.LazyCodes) -> Tensor:
        """Codes as words: a new tensor, or that of `out`, which `writes` then fills."""
        shape = packing.shape_of_words(codes.shape)
        return self._written(name, shape, torch.int32, lambda out: packing.pack(codes, out))

    def ordered(self, name: str, order: Order, tensor: Tensor) -> Tensor:
        """A tensor of two axes in another order: a new one, or that of `out`, which `writes` then fills."""
        return self._written(name, tensor.shape, tensor.dtype, lambda out: order.apply(tensor, out))

    def _written(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, write: Callable[[Tensor | None], Tensor]
    ) -> Tensor:
        out: Tensor | None = getattr(self.out, name, None)
        if out is None or not out.is_contiguous():
            return write(None)
        if (tuple(out.shape), out.dtype, out.device) != (tuple(shape), dtype, self.scales.device):
            return write(None)  # and `out` is refused as a whole
        self.writes.append(lambda: write(out))
        return out

    @property
    def origin(self) -> Origin:
        """What it was read from, at first."""
        origin = self.layer.origin
        assert isinstance(origin, Origin)  # every reader says
        return origin

    @property
    def source(self) -> str:
        """The format it was read from, at first, for messages."""
        return self.origin.weight_type.format

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.layer.N, self.layer.K

    @property
    def groups(self) -> int:
        """How many groups there are here."""
        return self.scales.shape[0]

    @property
    def decides(self) -> "Integers":
        """The layer whose facts decide."""
        return self.whole or self

    @cached_property
    def span(self) -> tuple[int, int]:
        """The lowest and the highest zero point of the layer that decides; of no outputs, the middle."""
        zeros = self.decides.zeros
        if self.decides.middle or not zeros.numel():
            return (2 ** (self.bits - 1),) * 2
        least, most = torch.stack(torch.aminmax(zeros)).tolist()  # one wait for a device, and not two
        return int(least), int(most)

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is 2**(bits - 1), so that a kernel need not read them."""
        return self.span == (2 ** (self.bits - 1),) * 2

    @cached_property
    def in_order(self) -> bool:
        """Whether rows and groups follow each other here, groups of one size but the last."""
        if self.groups == 1 or self.known_in_order:
            return True
        rows, K = self.group_size, self.layer.K
        here = torch.arange(K, device=self.g_idx.device) // rows if rows != -1 else None
        return here is not None and -(-K // rows) == self.groups and bool((self.g_idx == here).all())

    def why_no_index(self, layout: str) -> str | None:
        """Why `layout`, which has no group index, cannot say these groups on every rank, or None."""
        decides, size, K = self.decides, self.decides.group_size, self.layer.K
        if decides.groups == 1:
            return None
        if K % size and size % K:
            return f"K = {K} does not divide into groups of {size}"
        if not decides.in_order or not self.in_order:
            return f"the rows of its groups are not in order along K (act order), and {layout} has no g_idx"
        return None


def with_origin(weight: Weight, index: Tensor | None = None, *, keeps_zeros: bool = False) -> Layer:
    """The layer of a weight that is read, which knows from now on what it was."""
    if weight.layer.origin is not None:
        return weight.layer
    origin = Origin(type(weight), weight.config, None if index is None else index.dtype, keeps_zeros)
    return weight.layer.with_origin(origin, weight.layer.activations)


def middle_zero_points(bits: int, scales: Tensor) -> Tensor:
    """The zero points (G, N) of a type that stores none."""
    return torch.full_like(scales, 2 ** (bits - 1), dtype=torch.int32)


R = TypeVar("R", Tensor, PackedCodes)


def put_back(rows: R, perm: Tensor | None) -> R:
    """Row i goes to place perm[i]; None: they are in order."""
    if perm is None:
        return rows
    moved = rows[inverse(perm)]
    assert isinstance(moved, type(rows))  # packed codes are put back before they are turned
    return moved


def inverse(perm: Tensor) -> Tensor:
    """The permutation that undoes another; same dtype."""
    back = torch.empty_like(perm)
    back[perm.long()] = torch.arange(perm.numel(), dtype=perm.dtype, device=perm.device)
    return back
