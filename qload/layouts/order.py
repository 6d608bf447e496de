"""A layout sentence that is carried out on tensors: `apply`, and `undo` the way back.

Order("(kp i) n -> kp n i", i=8)
"""

from dataclasses import dataclass
from math import prod

from torch import Tensor

from qload import devices
from qload.errors import ArgumentError, checked
from qload.sentences import AxisDigits, Sentence


@dataclass(frozen=True, init=False)
class Order(Sentence):
    """A permutation of mixed-radix digits, as `"(a b) c -> a (c b)"` with the digits' sizes.

    PatternError where the line is no permutation, or leaves two digits of an axis open.

    Parameters
    ----------
    pattern
        The digits of each axis before and after, outermost first.
    sizes
        The size of each digit but the one of an axis that follows from the tensor.

    Examples
    --------
    >>> import torch
    >>> from qload import Order
    >>> pairs = Order("(half place) -> (place half)", half=2)
    >>> pairs.apply(torch.arange(6))
    tensor([0, 3, 1, 4, 2, 5])
    >>> pairs.undo(pairs.apply(torch.arange(6)))
    tensor([0, 1, 2, 3, 4, 5])
    """

    @checked
    def apply(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """The `tensor` in this order; shape of the left side -> shape of the right side, contiguous.

        PatternError for a shape that does not fit. `out`: a contiguous tensor to write it to, which is
        returned.
        """
        return self._moved(tensor, self.left, self.right, out)

    def undo(self, tensor: Tensor) -> Tensor:
        """The inverse of `apply`: `tensor`, of the right side's shape -> the left side's, contiguous."""
        return self._moved(tensor, self.right, self.left)

    def _moved(
        self, tensor: Tensor, source: AxisDigits, target: AxisDigits, out: Tensor | None = None
    ) -> Tensor:
        given: object = tensor
        if not isinstance(given, Tensor):
            raise ArgumentError("tensor", "a tensor", type(given).__name__)
        size = self.digits(tuple(tensor.shape), source)
        shape = [prod(size[digit] for digit in group) for group in target]
        wide = devices.writable(tensor, shape, tensor.dtype, out)
        devices.move(tensor, wide, size, source, target)
        return wide
