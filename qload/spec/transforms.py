"""`Transforms`: orthogonal matrices that a layer applies to its inputs and outputs when it runs.

    x' = x @ V,   y' = x' @ stored.T,   y = y' @ U

V and U are block-diagonal. A block is a matrix of +1 and -1 over the square root of its size, such as a
Hadamard matrix. Without transforms the weight is U.T @ stored @ V.T.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from math import sqrt
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from qload.errors import ArgumentError
from qload.lazy_torch import Tensor, torch


@dataclass(frozen=True)
class BlockTransform:
    """Orthogonal transform of blocks of `size` adjacent entries: x -> x @ signs / sqrt(size).

    Attributes
    ----------
    name
        Name of the transform, for messages.
    size
        Entries of a block.
    digest
        Hash of the signs, compared in their place.
    signs
        The matrix (size, size) of +1 and -1, int8.
    is_sylvester
        Whether it is Sylvester's matrix; a field, as Dynamo traces no numpy.
    """

    name: str = field(compare=False)
    size: int
    digest: str
    signs: NDArray[Any] = field(compare=False, repr=False)
    is_sylvester: bool = field(compare=False, repr=False)

    @classmethod
    def of_matrix(cls, name: str, matrix: NDArray[Any], *, transposed: bool = False) -> Self:
        """Transform by a `matrix`; ArgumentError unless its entries are +1 and -1 and it is orthogonal."""
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise ArgumentError(name, "a square matrix", f"shape {list(matrix.shape)}")
        wrong = np.argwhere(np.abs(matrix) != 1)
        if len(wrong):
            at = tuple(map(int, wrong[0]))
            raise ArgumentError(name, "entries of 1 and -1", f"{matrix[at]} at {at}")
        signs = np.ascontiguousarray(matrix.T if transposed else matrix, np.int8)
        size = len(signs)
        # The product with two vectors of whole numbers is exact, and much faster than the whole product.
        probes = np.stack([np.arange(1, size + 1), np.arange(size) ** 2 % 251]).astype(np.float64)
        wide = signs.astype(np.float64)
        if not np.array_equal(probes @ wide @ wide.T, size * probes):
            raise ArgumentError(name, "an orthogonal matrix", f"one of {size} rows that are not orthogonal")
        digest = blake2b(signs.tobytes(), digest_size=16).hexdigest()
        return cls(name, size, digest, signs, is_sylvester(signs))

    def apply(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        """Transform the last axis of x in blocks, by the transposed matrix if `transposed`."""
        return self.sums(x, transposed=transposed) / sqrt(self.size)

    def sums(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        """Sums of +x and -x in blocks of the last axis, in the dtype of x: `apply` without its factor."""
        blocks = x.reshape(*x.shape[:-1], x.shape[-1] // self.size, self.size)
        if self.is_sylvester:
            return walsh_hadamard(blocks).reshape(x.shape)  # a symmetric matrix
        matrix = signs_on(self, x.device).to(x.dtype)
        return (blocks @ (matrix.T if transposed else matrix)).reshape(x.shape)

    def __str__(self) -> str:
        """Summary such as `v_input in blocks of 64`."""
        return f"{self.name} in blocks of {self.size}"


@cache
def signs_on(transform: BlockTransform, device: torch.device) -> Tensor:
    """Copy the signs of a transform to a device: (size, size), int8. Copies are cached, for CUDA graphs."""
    return torch.from_numpy(transform.signs).to(device)


def is_sylvester(matrix: NDArray[Any]) -> bool:
    """Return True for a matrix of Sylvester: four equal quarters, the last one negated, down to a 1."""
    size = len(matrix)
    while size > 1 and size % 2 == 0:
        size //= 2
        quarter = matrix[:size, :size]
        others = (matrix[:size, size:], matrix[size:, :size], -matrix[size:, size:])
        if not all(np.array_equal(quarter, other) for other in others):
            return False
        matrix = quarter
    return bool(size == 1 and matrix[0, 0] == 1)


def walsh_hadamard(x: Tensor) -> Tensor:
    """Product of the last axis, a power of two, with Sylvester's Hadamard matrix, in sums of pairs."""
    size, step = x.shape[-1], 1
    while step < size:
        even, odd = x.reshape(*x.shape[:-1], size // (2 * step), 2, step).unbind(-2)
        x = torch.stack([even + odd, even - odd], -2).reshape(x.shape)
        step *= 2
    return x


def regular_hadamard(size: int) -> NDArray[Any]:
    """Symmetric Hadamard matrix with equal sums of rows: a Kronecker power of a 4 x 4 one; `size` is 4**n."""
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.int8)
    matrix = np.ones((1, 1), np.int8)
    while len(matrix) < size:
        matrix = np.kron(matrix, four)
    return matrix


@dataclass(frozen=True)
class Transforms:
    """Transforms of a layer's inputs and outputs; None: unchanged.

    Attributes
    ----------
    inputs
        V, applied before the product.
    outputs
        U, applied after the product and before a bias.
    """

    inputs: BlockTransform | None = None
    outputs: BlockTransform | None = None

    def step(self, dim: str) -> int:
        """Step of valid cuts of a dimension, "N" or "K"."""
        transform = self.inputs if dim == "K" else self.outputs
        return 1 if transform is None else transform.size

    def restore(self, stored: Tensor) -> Tensor:
        """Convert the stored weight (N, K) to the weight without transforms, in float64."""
        weight, scale = stored.double(), 1
        if self.inputs is not None:
            weight, scale = self.inputs.sums(weight, transposed=True), self.inputs.size
        if self.outputs is not None:
            weight, scale = self.outputs.sums(weight.T).T, scale * self.outputs.size
        return weight / sqrt(scale)

    def __str__(self) -> str:
        """Summary such as `inputs by v_input in blocks of 64`."""
        sides = (("inputs", self.inputs), ("outputs", self.outputs))
        return ", ".join(f"{side} by {transform}" for side, transform in sides if transform is not None)
