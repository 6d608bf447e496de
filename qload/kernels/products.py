"""x times any typed weight in the type of x: dequantized in slices, each multiplied by the vendor's product.

    y = rounded(sum over k of x[m, k] * w^[n, k] + bias[n]),   w^ = rounded(what dequantize() says)

Both roundings are to the type of x, sums are in float32 (float64 of float64). With u half a unit of that type
and v = 2**-24, y is off by (u + K v / (1 - K v)) * sum |x w| for the weight and the sums, and by u |y| for
itself; on a CPU, whose vendor may round before the bias is added, by that once more. Where float16 does not
hold a weight (`fits_float16`) all of it is in float32, in slices too. Each slice takes the memory of the one
before: whatever the weight, a call asks for no more than 256 MiB above y.

Settings of torch may let cuBLAS round partial sums to 16 bits, for all threads; they stay as they are. On
CUDA products of 16-bit numbers ask for sums in float32, rounded in the pass that adds the bias; oneDNN, on a
CPU, sums them in float32 anyway. Products of float32 have the precision of
`torch.set_float32_matmul_precision`, but those of few tokens on CUDA are in float32; of 16-bit numbers TF32
loses nothing.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.weak import WeakIdKeyDictionary

from qload import devices
from qload.devices import Stored, StoredCodes, StoredRows, StoredSparse, cuda
from qload.devices.cuda import module_for, on_device, stream
from qload.devices.cuda_stored import dequantize_stored, runs_down
from qload.devices.tensors import PLAIN, address
from qload.formats import (
    BNBWeight,
    CTIntWeight,
    CTNVFP4Weight,
    CTPackTensorWeight,
    Exl2Weight,
    Fp8Weight,
    Marlin24Weight,
    ModelOptNVFP4Weight,
    MXFP8Weight,
    UnquantizedWeight,
)
from qload.kernel_formats import (
    Exl2KernelWeight,
    ExllamaWeight,
    Fp4MarlinVllm033Weight,
    Fp4MarlinWeight,
    Fp4StripsWeight,
    Fp8MarlinWeight,
    Fp8StripsWeight,
    GPTQMarlinWeight,
    Int8StripsWeight,
    Mxfp8StripsWeight,
    TableStripsWeight,
)
from qload.sentences import WORD_BITS
from qload.sentences.strided_digits import WHOLE_BITS, holds_whole_codes
from qload.spec import Weight, outputs, ranges

MAX_FLOAT_TOKENS = 16
MAX_SUMS_BYTES = 64 << 20  # bytes of sums in float32 at once
TOKEN_MULTIPLE = 256  # of the tokens of a block of sums: tiles of the vendor's kernels divide it
NARROW = (torch.float16, torch.bfloat16)
WIDENS = hasattr(torch.ops.aten.mm, "dtype")  # whether mm gives sums in another dtype: torch 2.8
GPU_SLICE_BYTES = 160 << 20  # bytes of a slice on a GPU
CPU_SLICE_BYTES = 16 << 20  # the same on a CPU
OUTPUT_MULTIPLE = 1024  # outputs, of which a slice has a multiple: tiles of the vendor's kernels divide it
BYTE_TYPES = (UnquantizedWeight, BNBWeight, CTIntWeight, Fp8Weight, MXFP8Weight)  # a code a number
MAX_SLICE_BYTES = 240 << 20  # bytes of a slice and of what comes and goes while it is dequantized, on a GPU
SPELLED = 5  # of these, bytes a code where a GPU does not read codes as they are stored: an int32, and words
OF_FACTORS = 4  # and where the inputs have factors, by which a slice in float32 is multiplied
OF_TWO_SCALES = (CTNVFP4Weight, ModelOptNVFP4Weight)  # whose products take a byte a code at most
# Bits of codes whose words are put into plain order.
BITS = {
    Fp4MarlinWeight: 4,
    Fp4MarlinVllm033Weight: 4,
    Fp4StripsWeight: 4,
    TableStripsWeight: 4,
    Fp8MarlinWeight: 8,
    Fp8StripsWeight: 8,
    Int8StripsWeight: 8,
    Mxfp8StripsWeight: 8,
}
ACROSS = 5  # the same of codes that cross words
WIDER: dict[type[Weight], int] = {
    Exl2Weight: 9,
    Exl2KernelWeight: 13,
    Fp8MarlinWeight: 7,
    Fp8StripsWeight: 7,
    Int8StripsWeight: 7,
    Mxfp8StripsWeight: 7,
    Marlin24Weight: 14,
}
log: logging.Logger = logging.getLogger("qload")
_fitting: Any = WeakIdKeyDictionary()  # by the memory of a weight's first tensor
_storage_numbers: Any = WeakIdKeyDictionary()  # of memory: an address is used again
_counter = count()


def multiply_floats(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """y (M, N) = x (M, K) times w (N, K), plus bias (N,), all float32, and so the sums.

    False: not of this size, type or place, and nothing was done. A token has the same bits beside any other.
    """
    M, K = x.shape
    given = [y, x, w] if bias is None else [y, x, w, bias]
    if M > MAX_FLOAT_TOKENS or not x.is_cuda or any(each.dtype != torch.float32 for each in given):
        return False
    whole = x.is_contiguous() and w.is_contiguous() and (bias is None or bias.is_contiguous())
    module = module_for(*given)
    if module is None or not whole or y.stride(1) != 1:
        return False
    with on_device(y.device):
        sizes, pitch = (M, w.shape[0], K), y.stride(0)
        return bool(
            module.multiply_floats(
                x.data_ptr(), w.data_ptr(), address(bias), y.data_ptr(), (*sizes, pitch), stream(y)
            )
        )


def in_given_types(x: Tensor) -> AbstractContextManager[Any]:
    """Context without autocast, against casts of float32 operands."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def write_product(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    """y (M, n) = x (M, K) times w (n, K), plus a bias (n,) of any float dtype; x and w have one dtype."""
    if not _sums_in_float32(x):
        if not multiply_floats(y, x, w, bias):
            y.copy_(_product_without_settings(x, w, bias))
        return
    for tokens in token_blocks(y.shape[0], y.shape[1]):
        sums = wide_product(x[tokens], w)
        if bias is None:
            y[tokens].copy_(sums)
        else:
            torch.add(sums, bias, out=y[tokens])
        del sums  # before the next block asks for its memory


def torch_product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same, y (M, n) in x's dtype."""
    if not _sums_in_float32(x) and not _has_few_floats(x):
        return _product_without_settings(x, w, bias)
    y = x.new_empty(x.shape[0], w.shape[0])
    write_product(y, x, w, bias)
    return y


def wide_product(x: Tensor, w: Tensor) -> Tensor:
    """x (M, K) times w (n, K) of one dtype -> sums (M, n), in float32 for 16-bit numbers."""
    if _has_few_floats(x):
        return torch_product(x, w)
    if not _sums_in_float32(x):
        return linear(x.float(), w.float()) if x.dtype in NARROW else linear(x, w)
    made: Tensor = torch.ops.aten.mm.dtype(x, w.T, torch.float32)
    return made


def token_blocks(tokens: int, outputs: int) -> list[slice]:
    """Blocks of tokens with sums of at most `MAX_SUMS_BYTES`."""
    most = max(TOKEN_MULTIPLE, MAX_SUMS_BYTES // (4 * max(outputs, 1)) // TOKEN_MULTIPLE * TOKEN_MULTIPLE)
    return [slice(start, min(start + most, tokens)) for start in range(0, tokens, most)]


def _has_few_floats(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32 and x.shape[0] <= MAX_FLOAT_TOKENS


def _sums_in_float32(x: Tensor) -> bool:
    """Return whether torch computes this product with sums in float32: on CUDA, for 16-bit numbers."""
    return x.device.type == "cuda" and x.dtype in NARROW and WIDENS and not _sums_in_float16(x)


def _sums_in_float16(x: Tensor) -> bool:
    """Return whether settings of torch force sums in float16."""
    flags: Any = torch.backends.cuda.matmul
    return x.dtype == torch.float16 and bool(getattr(flags, "allow_fp16_accumulation", False))


def _product_without_settings(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Torch's product if its sums are in float32, else of the same numbers in float32."""
    if x.device.type == "cuda" and x.dtype in NARROW:
        added = None if bias is None else bias.float()
        return linear(x.float(), w.float(), added).to(x.dtype)
    if bias is None or bias.dtype == x.dtype:
        return linear(x, w, bias)
    return (linear(x, w) + bias).to(x.dtype)


def weight_slices(
    weight: Weight, dtype: torch.dtype, factors: Tensor | None = None, scratch: int | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield outputs [n0, n1) and their weights (n1 - n0, K), rounded once to a dtype, valid until the next.

    `factors`: (K,), by which inputs are multiplied first, and here the weight; before it is rounded.
    `scratch`: bytes of a slice, else as many as the device likes.
    """
    K, most = weight.layer.K, _outputs_of_slice(weight, dtype, factors, scratch)
    found = list(ranges(weight, most, OUTPUT_MULTIPLE if weight.device.type == "cuda" else 1))
    rows = max((stop - start for start, stop in found), default=0)
    buffer = devices.in_large_pages(torch.empty(rows, K, dtype=dtype, device=weight.device))
    for start, stop in found:
        out = buffer[: stop - start]
        if factors is None:
            _dequantize_slice(weight, start, out)
        else:
            _dequantize_scaled(weight, start, out, factors)
        yield slice(start, stop), out


def _dequantize_slice(weight: Weight, start: int, out: Tensor) -> None:
    """The outputs from `start` on, as many as `out` (n, K) has, rounded to its dtype.

    A GPU reads most weights as they lie, from any tile on. What it does not is cut first.
    """
    stored = weight.stored() if cuda.has_routines(*weight.fields().values(), out) else None
    if stored is None or not dequantize_stored(stored, out, start):
        outputs(weight, start, start + out.shape[0]).dequantize(out=out)


def _dequantize_scaled(weight: Weight, start: int, out: Tensor, factors: Tensor) -> None:
    """The same outputs times the factors of their inputs (K,), rounded once."""
    stored = weight.stored() if cuda.has_routines(*weight.fields().values(), out) else None
    if stored is None or not dequantize_stored(stored, out, start, factors):
        torch.mul(outputs(weight, start, start + out.shape[0]).dequantize(), factors, out=out)


def _outputs_of_slice(weight: Weight, dtype: torch.dtype, factors: Tensor | None, scratch: int | None) -> int:
    """Number of outputs per slice."""
    on_cpu, K = weight.device.type == "cpu", max(1, weight.layer.K)
    fits = (scratch if scratch is not None else CPU_SLICE_BYTES if on_cpu else GPU_SLICE_BYTES) // (
        K * dtype.itemsize
    )
    if on_cpu:
        return fits
    apart = factors is not None and not isinstance(_as_stored(weight), StoredRows)
    spelled = _spelled(weight) + OF_FACTORS * apart
    return min(fits, MAX_SLICE_BYTES // (K * (dtype.itemsize + spelled)))


def reads_in_place(weight: Weight) -> bool:
    """Return whether a GPU dequantizes a weight from its tensors without other memory."""
    if isinstance(weight, BYTE_TYPES):
        return True
    if isinstance(weight, CTPackTensorWeight):
        whole = weight.config.bits in WHOLE_BITS and weight.layer.K % WORD_BITS == 0
        return whole and cuda.has_routines(*weight.fields().values())
    return _as_stored(weight) is not None and _lies_in_whole_codes(weight)


def _as_stored(weight: Weight) -> Stored | None:
    """Stored order of a weight, if its GPU reads it."""
    return weight.stored() if cuda.has_routines(*weight.fields().values()) else None


def _lies_in_whole_codes(weight: Weight) -> bool:
    stored = weight.stored()
    if isinstance(stored, StoredSparse):
        return False  # its codes are put into order first
    if isinstance(stored, StoredCodes):
        return holds_whole_codes(stored.codes.packing) or runs_down(stored.codes.packing)
    return stored is not None


def _takes_a_byte(weight: Weight) -> bool:
    """Return whether a GPU needs another byte per code, for words in plain order or for scales."""
    if isinstance(weight, ExllamaWeight):
        return weight.config.bits in (2, 4)
    if isinstance(weight, GPTQMarlinWeight):
        return weight.config.bits == 4 and weight.padded_shape == weight.shape
    if type(weight) in BITS:  # padding is spelled out
        words = weight.fields()["qweight"]
        return bool(words.nbytes * 8 == BITS[type(weight)] * weight.layer.N * weight.layer.K)
    return isinstance(weight, OF_TWO_SCALES) or isinstance(weight.stored(), StoredSparse)


def _spelled(weight: Weight) -> int:
    """Temporary bytes per code during the dequantization of a slice."""
    if reads_in_place(weight):
        return 0
    if cuda.has_routines(*weight.fields().values()) and _takes_a_byte(weight):
        return 1
    crosses = weight.stored() is not None and not _lies_in_whole_codes(weight)
    return ACROSS if crosses else WIDER.get(type(weight), SPELLED)


def fits_float16(weight: Weight, dtype: torch.dtype, factors: Tensor | None = None) -> bool:
    """Return whether a weight, times the factors of its inputs, may be rounded to a dtype."""
    if dtype != torch.float16:
        return True
    tensors = [*weight.fields().values(), *([] if factors is None else [factors])]
    first = tensors[0]
    if type(first) not in PLAIN or first.is_meta:
        return False
    counted = not any(tensor.is_inference() for tensor in tensors)
    found = _fitting.setdefault(first.untyped_storage(), {}) if counted else {}
    key = (*map(_identity, tensors), type(weight), weight.config) if counted else ()
    if key not in found:
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        found[key] = _looked_at(weight, factors)
        if not found[key]:
            name = weight.layer.name or type(weight).__name__
            log.info("%s: float16 does not carry its values, it is multiplied in float32", name)
    carried: bool = found[key]
    return carried


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    memory = tensor.untyped_storage()
    if memory not in _storage_numbers:
        _storage_numbers[memory] = next(_counter)
    part = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return _storage_numbers[memory], tensor._version, part


def _looked_at(weight: Weight, factors: Tensor | None) -> bool:
    with torch.no_grad():
        fits = [_fits(w) for _, w in weight_slices(weight, torch.float32, factors)]
        return bool(torch.stack(fits).all()) if fits else True


def _fits(w: Tensor) -> Tensor:
    """Return whether rows fit float16, as a tensor of one bool; False for NaN."""
    if not w.numel():
        return torch.ones((), dtype=torch.bool, device=w.device)
    half = w.half()
    least, most = w.aminmax(dim=1)
    unit = torch.maximum(least.neg(), most) * torch.finfo(torch.float16).eps / 2
    off = w.sub_(half).abs_().amax(1)
    return (off <= unit).all()


def multiply(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    narrow: torch.dtype | None = None,
) -> Tensor:
    """x (M, K) -> (M, N) in x's dtype, with gradients of x and bias (N,).

    `factors`: (K,), of the inputs. `narrow`: what inputs and weight are rounded to, if not the dtype of x.
    """
    if not wants_gradients(x, bias):
        return _forward(x, weight, bias, factors, narrow)
    made: Tensor = _Product.apply(x, bias, weight, factors, narrow)  # type: ignore[no-untyped-call]
    return made


def wants_gradients(x: Tensor, bias: Tensor | None) -> bool:
    """Return whether autograd records x or a bias."""
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def in_slices(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    factors: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    scratch: int | None = None,
    count: int | None = None,
) -> Tensor:
    """x times a weight that fits its dtype, without gradients: y (M, N) in `dtype`, by default x's.

    `scratch`: bytes of a slice; `count`: how many outputs are wanted, the first.
    """
    N, y = weight.layer.N if count is None else count, None
    for rows, w in weight_slices(weight, x.dtype, factors, scratch):
        here = slice(min(rows.start, N), min(rows.stop, N))
        w, added = w[: here.stop - here.start], None if bias is None else bias[here]
        if here == slice(0, N) and dtype in (None, x.dtype):
            return torch_product(x, w, added)
        y = x.new_empty(x.shape[0], N, dtype=dtype) if y is None else y
        write_product(y[:, here], x, w, added)
    return x.new_empty(x.shape[0], N, dtype=dtype) if y is None else y


def _forward(
    x: Tensor, weight: Weight, bias: Tensor | None, factors: Tensor | None, narrow: torch.dtype | None
) -> Tensor:
    own = _carried(x, weight, factors, narrow)
    return in_slices(x.to(own), weight, bias, factors, dtype=x.dtype)


def transposed(
    y: Tensor, weight: Weight, factors: Tensor | None = None, narrow: torch.dtype | None = None
) -> Tensor:
    """y (M, N) times the weight (N, K) -> (M, K) in y's dtype: the gradient of x."""
    own = _carried(y, weight, factors, narrow)
    total: Tensor | None = None
    for rows, w in weight_slices(weight, own, factors):
        part = wide_product(y[:, rows].to(own), w.T)
        total = part if total is None else total.add_(part)
    return y.new_zeros(y.shape[0], weight.layer.K) if total is None else total.to(y.dtype)


def _carried(x: Tensor, weight: Weight, factors: Tensor | None, narrow: torch.dtype | None) -> torch.dtype:
    """Dtype of both sides of the product."""
    own = narrow or x.dtype
    return own if fits_float16(weight, own, factors) else torch.float32


class _Product(torch.autograd.Function):
    """x times a frozen weight, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
        ctx.weight, ctx.bias_type = weight, None if bias is None else bias.dtype
        return _forward(x, weight[0], bias, *weight[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), of_x, of_bias = grads, None, None
        if ctx.needs_input_grad[0]:
            of_x = _Transposed.apply(grad, *ctx.weight)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(grad.dtype, torch.float32)
            of_bias = grad.sum(0, dtype=wide).to(ctx.bias_type)
        return of_x, of_bias, *(None for _ in ctx.weight)


class _Transposed(torch.autograd.Function):
    """Gradient of `_Product`, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *weight: Any) -> Tensor:
        ctx.weight = weight
        return transposed(grad, *weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        made: Tensor = _Product.apply(grads[0], None, *ctx.weight)  # type: ignore[no-untyped-call]
        return made, *(None for _ in ctx.weight)
