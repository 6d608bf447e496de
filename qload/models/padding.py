"""Heads made as wide as an attention backend wants them, and back: zeros that no result sees.

Queries and keys that end in zeros have the scores that they had: the scale of the softmax is that of the true
size. Values that end in zeros give outputs that end in zeros, which `unpadded` drops.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qload.errors import ArgumentError, ShapeError, check_fields


@dataclass(frozen=True)
class HeadSizes:
    """Which sizes of heads an attention backend takes; by default all, of keys and values apart.

    ArgumentError for a size or a multiple below 1.

    Attributes
    ----------
    only
        The sizes that there are kernels for; None: all multiples of `multiple`.
    multiple
        What a size has to be a multiple of.
    largest
        The largest size; None: there is none.
    equal
        Whether keys and values have to be of one size.
    """

    only: tuple[int, ...] | None = None
    multiple: int = 1
    largest: int | None = None
    equal: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        numbers = {"only": min(self.only or (1,)), "multiple": self.multiple, "largest": self.largest or 1}
        for name, number in numbers.items():
            if number < 1 or getattr(self, name) in (0, ()):
                raise ArgumentError(name, "sizes of 1 or more", str(getattr(self, name)))

    def padded(self, key: int, value: int) -> tuple[int, int]:
        """The sizes that heads of `key` (queries too) and of `value` get: the smallest that do.

        ArgumentError where there is none.
        """
        if self.equal:
            key = value = max(key, value)
        return self._fitting("key", key), self._fitting("value", value)

    def _fitting(self, name: str, size: int) -> int:
        multiple = -(-size // self.multiple) * self.multiple
        fitting = [multiple] if self.only is None else [each for each in self.only if each >= size]
        fitting = [each for each in fitting if each % self.multiple == 0 and each <= (self.largest or each)]
        if size < 1 or not fitting:
            raise ArgumentError(name, f"a size of heads that the backend takes, of {self}", str(size))
        return min(fitting)


def padded(heads: Tensor, size: int) -> Tensor:
    """`heads` (..., D) with zeros after them: (..., `size`); as they are where D is `size`.

    ShapeError for a `size` below D.
    """
    missing = size - heads.shape[-1]
    if missing < 0:
        raise ShapeError("heads", f"(..., D) of D <= {size}", tuple(heads.shape))
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


def unpadded(heads: Tensor, size: int) -> Tensor:
    """The first `size` elements of `heads` (..., D): (..., `size`), a view; ShapeError for fewer."""
    if heads.shape[-1] < size:
        raise ShapeError("heads", f"(..., D) of D >= {size}", tuple(heads.shape))
    return heads[..., :size]
