"""A fault that is planted in somebody's kernel: in the weight that it packs, or in what it multiplies."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qload.spec import Weight

Change = Callable[[Weight], Weight | None]
Gemm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class KernelFault:
    """One way of being wrong.

    Attributes
    ----------
    name, words
        Its id, and what it does.
    classes
        The ids of `qload.diagnosis` that name it rightly.
    change
        A weight -> the one that is packed instead; None where there is nothing to change.
    around
        A product x (M, K) -> y (M, N), and how many outputs it has -> the wrong product.
    """

    name: str
    words: str
    classes: tuple[str, ...]
    change: Change | None = None
    around: Callable[[Gemm, int], Gemm] | None = None

    def packed(self, weight: Weight) -> Weight | None:
        """What is packed in place of a `weight`; None where the fault changes no number of it."""
        if self.change is None:
            return weight
        changed = self.change(weight)
        if changed is None or _equal(changed, weight):
            return None
        return changed

    def gemm(self, product: Gemm, N: int) -> Gemm:
        """The wrong `product` of `N` outputs."""
        return product if self.around is None else self.around(product, N)


def _equal(one: Weight, other: Weight) -> bool:
    return torch.equal(one.dequantize().nan_to_num(), other.dequantize().nan_to_num())
