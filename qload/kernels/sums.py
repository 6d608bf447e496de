"""The vendor's products: sums in float32 and one rounding, whatever a program allows for its own.

A program may let cuBLAS round partial sums of its own products to 16 bits, by settings that hold for all
threads. They are never touched here: on CUDA sums of 16-bit numbers are asked for in float32 and rounded in
the pass that adds the bias. oneDNN, on a CPU, sums 16-bit numbers in float32 on its own.

Products of float32 are torch's own, in whatever precision a program has set for them
(`torch.set_float32_matmul_precision`), but those of few tokens on CUDA, which are in float32; of 16-bit
numbers TF32 loses nothing.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from qload.kernels.cuda import floats

SUMS = 64 << 20  # bytes of sums in float32 at once
ROWS = 256  # tokens, of which a block of sums has a multiple: tiles of the vendor's kernels divide it
NARROW = (torch.float16, torch.bfloat16)
WIDENS = hasattr(torch.ops.aten.mm, "dtype")  # whether mm gives sums in another dtype: torch 2.8


def in_given_types(x: Tensor) -> AbstractContextManager[Any]:
    """In which torch casts nothing on its own: autocast would round what is multiplied in float32."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def into(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """y (M, n) = x (M, K) times w (n, K), plus a bias (n,) of any float dtype; x and w have one dtype."""
    if not _asks_for_sums(x):
        if not floats.multiply(y, x, w, bias):
            y.copy_(_own(x, w, bias))
        return
    for tokens in blocks(y.shape[0], y.shape[1]):
        sums = wide(x[tokens], w)
        if bias is None:
            y[tokens].copy_(sums)
        else:
            torch.add(sums, bias, out=y[tokens])
        del sums  # before the next block asks for its memory


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same, y (M, n) in x's dtype."""
    if not _asks_for_sums(x) and not _is_few(x):
        return _own(x, w, bias)
    y = x.new_empty(x.shape[0], w.shape[0])
    into(y, x, w, bias)
    return y


def wide(x: Tensor, w: Tensor) -> Tensor:
    """x (M, K) times w (n, K), which have one dtype: the sums (M, n), float32 of 16-bit numbers."""
    if _is_few(x):
        return product(x, w)
    if not _asks_for_sums(x):
        return linear(x.float(), w.float()) if x.dtype in NARROW else linear(x, w)
    made: Tensor = torch.ops.aten.mm.dtype(x, w.T, torch.float32)
    return made


def blocks(tokens: int, outputs: int) -> list[slice]:
    """Tokens whose sums fit `SUMS`, block after block."""
    most = max(ROWS, SUMS // (4 * max(outputs, 1)) // ROWS * ROWS)
    return [slice(start, min(start + most, tokens)) for start in range(0, tokens, most)]


def _is_few(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32 and x.shape[0] <= floats.MOST_TOKENS


def _asks_for_sums(x: Tensor) -> bool:
    """Whether torch is asked for sums in float32: on CUDA, of 16-bit numbers."""
    return x.device.type == "cuda" and x.dtype in NARROW and WIDENS and not _sums_in_float16(x)


def _sums_in_float16(x: Tensor) -> bool:
    """Whether a program lets products of float16 be summed in it, which torch then does whatever is asked."""
    flags: Any = torch.backends.cuda.matmul
    return x.dtype == torch.float16 and bool(getattr(flags, "allow_fp16_accumulation", False))


def _own(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Torch's own product, where its sums are in float32, and else of the same numbers in float32."""
    if x.device.type == "cuda" and x.dtype in NARROW:
        added = None if bias is None else bias.float()
        return linear(x.float(), w.float(), added).to(x.dtype)
    if bias is None or bias.dtype == x.dtype:
        return linear(x, w, bias)
    return (linear(x, w) + bias).to(x.dtype)
