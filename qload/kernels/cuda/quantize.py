"""Quantized inputs on a CUDA device in one launch, and results from sums in another."""

from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from qload.devices.cuda import RUN, module_for, stream
from qload.devices.tensors import FLOATS, address
from qload.errors import ArgumentError
from qload.kernels.activations import MOST
from qload.spec import ActivationScheme

LARGEST, INVERSE, INVERSE_ONE, POWERS_NEAR, POWERS_UP, ASYMMETRIC, STORED = range(7)  # see quantize.h
CODES, COUNTED, MEANT = range(3)
EIGHT = 8  # inputs that a thread takes together
GROUPS = (8, 16, 32, 64, 128, 256)  # inputs that may share a scale, if not all of a token do
FOUR = 4  # results that a thread writes together


def finding(scheme: ActivationScheme) -> int | None:
    """Number of the module's rule for a scheme's scales; None: it has no such rule."""
    if scheme.scale_type == "e4m3" or scheme.dynamic == "local" or (scheme.type, scheme.bits) == ("float", 4):
        return None
    if not scheme.dynamic:
        return STORED
    if not scheme.symmetric:
        return ASYMMETRIC
    if scheme.scale_type == "e8m0":
        return POWERS_NEAR if scheme.owner == "compressed-tensors" else POWERS_UP
    if scheme.owner in ("fbgemm", "modelopt"):
        return None if scheme.type == "int" else INVERSE if scheme.owner == "fbgemm" else INVERSE_ONE
    return LARGEST


def scale_divisor(scheme: ActivationScheme) -> float:
    """Divisor of the largest input, and for floats the largest code."""
    if scheme.type == "float":
        return MOST[scheme.bits]
    levels = float(2**scheme.bits - 1)
    return levels / 2 if scheme.symmetric else levels


@dataclass
class NativeInputs:
    """Inputs (M, K) with codes on demand, in the form of each demand.

    `steps` and `zero_points` are those of `QuantizedActivations`, once it did.
    """

    x: Tensor
    scheme: ActivationScheme
    module: ModuleType
    stored: tuple[Tensor | None, Tensor | None]
    steps: Tensor = field(init=False)
    zero_points: Tensor | None = field(init=False, default=None)

    @property
    def wide(self) -> bool:
        """False: no codes of float64."""
        return False

    @property
    def has_zeros(self) -> bool:
        """True for codes with zero points."""
        return self.stored[1] is not None if not self.scheme.dynamic else not self.scheme.symmetric

    @property
    def one_step(self) -> bool:
        """True for one scale per token."""
        return self._size == 0

    @property
    def _size(self) -> int:
        size = self.scheme.size or 0
        return 0 if size == self.x.shape[1] else size

    def codes(self, dtype: torch.dtype, rows: int = 0) -> Tensor:
        """Codes (rows or M, K), e4m3 or int8; after the tokens a row of ones for zero points, then zeros."""
        M, K = self.x.shape
        out = self.x.new_empty(max(rows, M), K, dtype=dtype)
        self._run(CODES, out, None)
        return out

    def counted(self, dtype: torch.dtype) -> Tensor:
        """Codes (M, K) less their zero points, exact in `dtype`."""
        out = self.x.new_empty(self.x.shape, dtype=dtype)
        self._run(COUNTED, out, None)
        return out

    def meant(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Values (M, K) of the codes over a power of two for each token, rounded; the powers (M, 1)."""
        out = self.x.new_empty(self.x.shape, dtype=dtype)
        powers = self.x.new_empty(self.x.shape[0], 1, dtype=torch.float32)
        self._run(MEANT, out, powers)
        return out, powers

    def _run(self, becoming: int, out: Tensor, powers: Tensor | None) -> None:
        x, scheme, size, how = self.x, self.scheme, self._size, finding(self.scheme)
        (M, K), every = x.shape, scheme.covers_all_tokens
        shape = (1,) if every or not scheme.dynamic else (M, K // size if size else 1)
        self.steps = x.new_empty(shape, dtype=torch.float32)
        self.zero_points = torch.empty_like(self.steps) if self.has_zeros else None
        scratch = x.new_empty(2, M, dtype=torch.int32) if every and M > 1 else None
        kind = FLOATS.index(out.dtype) if becoming != CODES else 0
        made = tuple(map(address, (out, self.steps, self.zero_points, powers, scratch)))
        with torch.cuda.device(x.device):
            done = self.module.quantize(
                x.data_ptr(), FLOATS.index(x.dtype), (M, K, x.stride(0)),
                (how, size, every, scheme.type == "int", scheme.bits),
                scale_divisor(scheme), scheme.upper_bound or 0.0, tuple(map(address, self.stored)),
                (becoming, kind), (out.shape[0], self.has_zeros), made, stream(x),
            )  # fmt: skip
        if not done:
            raise ArgumentError(
                "x", f"rows of a multiple of {EIGHT} inputs, from {RUN} bytes on", str(x.stride())
            )


def inputs(
    x: Tensor, scheme: ActivationScheme, scale: Tensor | None, zero_point: Tensor | None
) -> NativeInputs | None:
    """Inputs (M, K) for the module; None if it does not take them.

    `scale`, `zero_point`: those that are stored, () or (1,).
    """
    M, K = x.shape
    if not x.is_cuda or x.dtype not in FLOATS or not M or K % EIGHT or finding(scheme) is None:
        return None
    if scheme.size not in (None, K, *GROUPS) or K % (scheme.size or 1):
        return None
    if x.stride(1) != 1 or x.data_ptr() % RUN or x.stride(0) * x.itemsize % RUN:
        return None
    kept = [None if scheme.dynamic or each is None else each for each in (scale, zero_point)]
    one, other = (None if each is None else each.reshape(1).float() for each in kept)
    module = module_for(x, *(each for each in (one, other) if each is not None))
    return None if module is None else NativeInputs(x, scheme, module, (one, other))


def finish(
    found: Tensor, row: Tensor, column: Tensor | None, zeros: Tensor | None, bias: Tensor | None, y: Tensor
) -> bool:
    """Write y = rounded((found[:M] - zeros * found[M]) * row * column + bias); False: nothing was written.

    found: (M, n) float32, or int32, with zeros (M, 1) or (1,) one row more. row: (M, 1) or (1,), column:
    (n,), both float32; bias (n,) of any float dtype.
    """
    (M, N), tensors = y.shape, [found, row, column, zeros, bias, y]
    module = module_for(*(each for each in tensors if each is not None)) if y.is_cuda else None
    if module is None or y.dtype not in FLOATS or y.stride(1) != 1 or not found.is_contiguous() or N % FOUR:
        return False
    if found.dtype not in (torch.float32, torch.int32) or not _each(row, M) or not _each(zeros, M):
        return False
    if not _each(column, N) or (bias is not None and (bias.dtype not in FLOATS or bias.stride(0) != 1)):
        return False
    added = address(bias), 0 if bias is None else FLOATS.index(bias.dtype)
    pairs = [(address(each), each is not None and _many(each)) for each in (row, column, zeros)]
    whole, sizes = found.dtype == torch.int32, (M, N, y.stride(0))
    with torch.cuda.device(y.device):
        at = address(y), FLOATS.index(y.dtype), stream(y)
        return bool(module.scale_sums(found.data_ptr(), whole, sizes, *pairs, added, *at))


def _many(factors: Tensor) -> bool:
    """Return whether factors differ in memory: an expanded one has a stride of 0."""
    return factors.numel() > 1 and factors.stride(0) != 0


def _each(factors: Tensor | None, count: int) -> bool:
    """Return whether there is one factor, or `count` contiguous ones."""
    if factors is None:
        return True
    if factors.dtype != torch.float32 or factors.numel() not in (1, count):
        return False
    return not _many(factors) or factors.stride(0) == 1
