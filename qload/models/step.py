"""`Step`: where the tokens of one pass through a model stand, and where their keys and values go."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from qload.errors import ArgumentError, ShapeError, check_fields

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Step:
    """T = S * Q tokens: of S sequences Q new tokens each, one sequence after another.

    Nothing in it is looked at from the host, so that a step of fixed sizes can be captured in a CUDA graph.
    ArgumentError for tensors that are no indices or lie on several devices, ShapeError for other shapes.

    Attributes
    ----------
    positions
        (T,), int64: the place of each token in its sequence, from 0 on.
    slots
        (T,), int64: where its keys and values are written: page * page size + place in the page.
    pages
        (S, P), int64: the pages of each sequence in the order of its tokens. What a sequence has no page for
        yet holds the number of any page: no token sees it.
    """

    positions: Tensor
    slots: Tensor
    pages: Tensor
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        for name, tensor, dims in (
            ("positions", self.positions, 1),
            ("slots", self.slots, 1),
            ("pages", self.pages, 2),
        ):
            if tensor.dtype != torch.int64:
                raise ArgumentError(f"step: {name}", "indices of int64", str(tensor.dtype))
            if tensor.device != self.positions.device:
                raise ArgumentError(
                    f"step: {name}", f"a tensor on {self.positions.device}", str(tensor.device)
                )
            if tensor.ndim != dims:
                raise ShapeError(f"step: {name}", "(T,)" if dims == 1 else "(S, P)", tuple(tensor.shape))
        tokens, sequences = self.positions.shape[0], self.pages.shape[0]
        if not sequences or tokens % sequences:
            raise ShapeError("step: positions", f"(S * Q,) with S = {sequences} sequences", (tokens,))
        if self.slots.shape[0] != tokens:
            raise ShapeError("step: slots", f"({tokens},), as positions", tuple(self.slots.shape))

    @classmethod
    def of(
        cls,
        starts: list[int],
        *,
        tokens: int,
        pages: list[list[int]],
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> "Step":
        """The next `tokens` of sequences that have `starts` tokens, whose `pages` are lists of one length.

        `page_size`: tokens of a page; `device`: where the tensors are made.
        """
        places = [[start + new for new in range(tokens)] for start in starts]
        slots = [
            own[at // page_size] * page_size + at % page_size
            for own, each in zip(pages, places, strict=True)
            for at in each
        ]
        made = ([at for each in places for at in each], slots, pages)
        positions, to, table = (torch.tensor(each, dtype=torch.int64, device=device) for each in made)
        return cls(positions, to, table)

    @property
    def sequences(self) -> int:
        """S, how many sequences there are."""
        return self.pages.shape[0]

    @property
    def new(self) -> int:
        """Q, how many new tokens each has."""
        return self.positions.shape[0] // self.sequences

    def begun(self) -> Self:
        """The same step with nothing kept: what `kept` holds follows from tensors that may be rewritten."""
        return replace(self, _kept={})

    def kept(self, key: Any, make: Callable[[], R]) -> R:
        """What `make` returned for a `key` when it was asked for first in this pass, for layers to share."""
        if key not in self._kept:
            self._kept[key] = make()
        made: R = self._kept[key]
        return made
