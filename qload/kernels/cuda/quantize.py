"""Quantized inputs on a CUDA device in one launch, and results from sums in another."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qload.devices.cuda import RUN, empty_rows, module_for, stream
from qload.devices.tensors import FLOATS, address
from qload.errors import ArgumentError
from qload.kernels.activations import MOST
from qload.spec import ActivationScheme

# See quantize.h.
LARGEST, INVERSE, INVERSE_ONE, POWERS_NEAR, POWERS_UP, ASYMMETRIC, STORED, E4M3_OVER, E4M3_TIMES = range(9)
CODES, COUNTED, MEANT, PERMUTED = range(4)
EIGHT = 8  # inputs that a thread takes together
PERMUTED_INPUTS = 32  # neighbours whose codes have another order for w8a8
GROUPS = (8, 16, 32, 64, 128, 256)  # inputs that may share a scale, if not all of a token do
STORED_DTYPES = (*FLOATS, torch.int8)  # of stored scales and zero points, by native number
FOUR = 4  # results that a thread writes together


def finding(scheme: ActivationScheme) -> int | None:
    """Number of the module's rule for a scheme's scales; None: it has no such rule."""
    if scheme.scale_type == "e4m3":
        return None if scheme.type == "int" else E4M3_TIMES if scheme.owner == "modelopt" else E4M3_OVER
    if scheme.dynamic == "local":
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


def reads_stored(scheme: ActivationScheme) -> bool:
    """Return whether a scheme's scales depend on a stored one."""
    return not scheme.dynamic or scheme.scale_type == "e4m3"


def takes(scheme: ActivationScheme, K: int) -> bool:
    """Return whether the module quantizes K inputs of a token by a scheme."""
    size = scheme.size or K
    return finding(scheme) is not None and K % EIGHT == 0 and size in (K, *GROUPS) and K % max(1, size) == 0


def group_of(scheme: ActivationScheme, K: int) -> int:
    """Inputs of a group of the module; 0: one scale covers all K inputs of a token."""
    return 0 if scheme.size in (None, K) else scheme.size or 0


def prepare(
    module: Any, dtype: torch.dtype, K: int, scheme: ActivationScheme, becoming: int, made: torch.dtype,
    stored: Sequence[torch.dtype | None] = (None, None), *, scale_each: bool = False, ones: bool = False,
    each: bool = False,
) -> Any:  # fmt: skip
    """Return the module's launch for inputs of a dtype; `made`: dtype of the result, unless it is codes.

    `stored`: dtypes of the stored scale and zero point; None: there is none. `scale_each`: a float32 scale
    of each token replaces the stored one. `ones`: a row of ones follows the tokens. `each`: a step is
    written for each token, even if all share one.
    """
    kind = FLOATS.index(made) if becoming in (COUNTED, MEANT) else 0
    rule = finding(scheme), group_of(scheme, K), scheme.covers_all_tokens, scheme.type == "int", scheme.bits
    most, bound = scale_divisor(scheme), scheme.upper_bound or 0.0
    types = [0 if one is None else STORED_DTYPES.index(one) for one in stored]
    return module.quantizer(
        FLOATS.index(dtype), K, rule, most, bound, (becoming, kind), types, scale_each, ones, each
    )


class RoundedInputs:
    """Launch that rounds inputs (M, K) by a scheme, to numbers of their 16-bit dtype and factors of tokens.

    One scale for all inputs of a token: the numbers are codes less zero points, which 16 bits represent, and
    the factor is the scale. Scales of groups: the numbers are values over a power of two that brings them
    below 2**8, and the factor is that power. So float16 holds values beyond its range, such as 256 * 2**8 of
    e4m3 for an input of 65504; values beyond float32's are infinite, as in `activations.quantize`.

    `coded`: codes of 8 bits instead, permuted for `w8a8`, of one scale for all inputs of a token.
    `scale_each`: each token has a stored scale, in float32.
    """

    def __init__(
        self,
        module: Any,
        dtype: torch.dtype,
        K: int,
        scheme: ActivationScheme,
        stored: Sequence[torch.dtype | None],
        *,
        coded: bool = False,
        scale_each: bool = False,
    ) -> None:
        self._grouped, self._all = group_of(scheme, K) > 0, scheme.covers_all_tokens
        becoming = PERMUTED if coded else MEANT if self._grouped else COUNTED
        self._start = prepare(
            module, dtype, K, scheme, becoming, dtype, stored, scale_each=scale_each, each=True
        )
        self._K, self._columns = K, self.width(K) // dtype.itemsize if coded else K

    @staticmethod
    def width(K: int) -> int:
        """Codes of a token, with zeros after K."""
        return -(-K // PERMUTED_INPUTS) * PERMUTED_INPUTS

    def start(self, x: Tensor, tokens: int, scale: int, zero_point: int, stream: int) -> tuple[Tensor, int]:
        """Round x, contiguous, on the current device -> the memory of the numbers, address of the factors.

        `scale`, `zero_point`: addresses of stored ones; 0 for none.
        """
        K, columns = self._K, self._columns
        memory = empty_rows(x, tokens, columns + 2 + 4 * self._all)  # factors and maxima are of 32 bits
        numbers = memory.data_ptr()
        factors = numbers + 2 * tokens * columns
        steps, powers = (0, factors) if self._grouped else (factors, 0)
        scratch = factors + 4 * tokens if self._all else 0
        done = self._start(
            x.data_ptr(), tokens, K, scale, zero_point, tokens, numbers, steps, 0, powers, scratch, stream
        )
        if not done:
            raise _unaligned(x)
        return memory, factors

    def split(self, memory: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Numbers (tokens, K) and factors (tokens,) in the memory of `start`."""
        flat, count = memory.flatten(), tokens * self._columns
        return flat[:count].view(tokens, -1), flat[count:].view(torch.float32)[:tokens]


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
        return group_of(self.scheme, self.x.shape[1])

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
        x, scheme, size = self.x, self.scheme, self._size
        (M, K), every = x.shape, scheme.covers_all_tokens
        shape = (1,) if every or not scheme.dynamic else (M, K // size if size else 1)
        self.steps = x.new_empty(shape, dtype=torch.float32)
        self.zero_points = torch.empty_like(self.steps) if self.has_zeros else None
        scratch = x.new_empty(2, M, dtype=torch.int32) if every and M > 1 else None
        dtypes = [None if each is None else each.dtype for each in self.stored]
        start = prepare(self.module, x.dtype, K, scheme, becoming, out.dtype, dtypes, ones=self.has_zeros)
        made = map(address, (out, self.steps, self.zero_points, powers, scratch))
        with torch.cuda.device(x.device):
            done = start(
                x.data_ptr(), M, x.stride(0), *map(address, self.stored), out.shape[0], *made, stream(x)
            )
        if not done:
            raise _unaligned(x)


def _unaligned(x: Tensor) -> ArgumentError:
    return ArgumentError("x", f"rows of a multiple of {EIGHT} inputs, from {RUN} bytes on", str(x.stride()))


def inputs(
    x: Tensor, scheme: ActivationScheme, scale: Tensor | None, zero_point: Tensor | None
) -> NativeInputs | None:
    """Inputs (M, K) for the module; None if it does not take them.

    `scale`, `zero_point`: those that are stored, () or (1,).
    """
    M, K = x.shape
    if not x.is_cuda or x.dtype not in FLOATS or not M or not takes(scheme, K):
        return None
    if x.stride(1) != 1 or x.data_ptr() % RUN or x.stride(0) * x.itemsize % RUN:
        return None
    kept = (scale, zero_point) if reads_stored(scheme) else (None, None)
    if any(each is not None and each.dtype not in STORED_DTYPES for each in kept):
        return None
    one, other = (None if each is None else each.reshape(1) for each in kept)
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
