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
    """A permutation of mixed-radix digits, as `"(a b) c -> a (c b)"` with the digits' sizes."""

    @checked
    def apply(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """The tensor in this order; shape of the left side -> shape of the right side, contiguous.

        `out`: a contiguous tensor to write it to, which is returned.
        """
        return self._moved(tensor, self.left, self.right, out)

    def undo(self, tensor: Tensor) -> Tensor:
        """The inverse of `apply`; shape of the right side -> shape of the left side, contiguous."""
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
