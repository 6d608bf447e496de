"""Whether a layer's scales are those that its codes were quantized with, beside the float original.

The scale that fits a group best is a least-squares one: the sum of code times weight over that of code times
code. In a sound layer it follows the group's own scale, with the noise of rounding. What an input or an
output was multiplied by before it was quantized, as AWQ does, is a factor of a whole row or column of
groups: those are taken out.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qload.spec import Codes

GROUPS = 512  # of which a correlation is taken, at least
INNER = 4  # groups of an output, of fewer of which its factor takes all with it
FOLLOWS = 0.2  # sound ones had 0.5 and more, with errors as large as the weights; another layer's about 0
SPREAD = 0.01  # of logarithms; groups whose scales differ less follow nothing


@dataclass
class ScaleFit:
    """Squares and products of the logarithms of scales and of the scales that fit best, run by run."""

    count: int = 0
    stored: float = 0.0
    fitted: float = 0.0
    both: float = 0.0

    def add(self, codes: Codes, want: Tensor) -> None:
        """Another run of outputs of a layer, (N, K) float32; nothing where its groups span outputs."""
        if codes.n_group is not None or codes.divide or want.ndim != 2:
            return
        N, K = want.shape
        scales = codes.scales.float()
        if scales.shape[0] != N or not INNER <= scales.shape[1] < K or codes.k_group is None:
            return
        index = codes.k_group.long()
        values = _values(codes, index)
        above, below = (
            torch.zeros(scales.shape).index_add_(1, index, each) for each in (values * want, values**2)
        )
        fitted = above / below
        kept = (scales != 0) & (fitted * scales > 0) & fitted.isfinite() & scales.isfinite()
        if not bool(kept.all(1).any()):
            return
        whole = kept.all(1)
        x, y = (_centred(each[whole].abs().log()) for each in (scales, fitted))
        self.count += x.numel()
        self.stored += float(x.square().sum())
        self.fitted += float(y.square().sum())
        self.both += float((x * y).sum())

    def mistake(self) -> str | None:
        """What is wrong, in words; None where the scales follow the original, or nothing can be said."""
        found = self.correlation
        if found is None or found >= FOLLOWS:
            return None
        return (
            f"its {self.count} scales follow those that fit its codes to the reference with a correlation of "
            f"{found:.2f}, where sound ones have {FOLLOWS} and far more: they are another layer's"
        )

    @property
    def correlation(self) -> float | None:
        """Of the two; None where there are too few groups, or they hardly differ."""
        least = self.count * SPREAD**2
        if self.count < GROUPS or self.stored < least or self.fitted < least:
            return None
        return self.both / math.sqrt(self.stored * self.fitted)


def _values(codes: Codes, index: Tensor) -> Tensor:
    """What the codes stand for before they are scaled, (N, K)."""
    plain = codes.plain()
    if codes.lookup is not None:
        return codes.lookup.float()[plain.long()]
    values = plain.float()
    if codes.zeros is None:
        return values
    return values - codes.zeros.expand(len(plain), codes.scales.shape[1]).float().index_select(1, index)


def _centred(values: Tensor) -> Tensor:
    """Without the mean of each row and of each column."""
    rows, columns = values.mean(1, keepdim=True), values.mean(0, keepdim=True)
    return values - rows - columns + values.mean()
