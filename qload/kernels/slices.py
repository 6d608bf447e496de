"""A weight in the type of its activations, a slice of its outputs after another, in one piece of memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from qload import devices
from qload.devices import Stored, StoredCodes, StoredRows, StoredSparse, cuda
from qload.devices.cuda_stored import dequantize_stored, runs_down
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
    Fp8MarlinWeight,
    GPTQMarlinWeight,
)
from qload.sentences import WORD_BITS
from qload.sentences.strided_digits import WHOLE_BITS, holds_whole_codes
from qload.spec import Weight, outputs, ranges

SCRATCH = 160 << 20  # bytes of a slice on a GPU
IN_CACHE = 16 << 20  # the same on a CPU
EVEN = 1024  # outputs, of which a slice has a multiple: tiles of the vendor's kernels divide it
IN_PLACE = (UnquantizedWeight, BNBWeight, CTIntWeight, Fp8Weight, MXFP8Weight)  # a code a number
MOST = 240 << 20  # bytes of a slice and of what comes and goes while it is dequantized, on a GPU
SPELLED = 5  # of these, bytes a code where a GPU does not read codes as they are stored: an int32, and words
OF_FACTORS = 4  # and where the inputs have factors, by which a slice in float32 is multiplied
OF_TWO_SCALES = (CTNVFP4Weight, ModelOptNVFP4Weight)  # whose products take a byte a code at most
# Bits of codes whose words are put into plain order.
BITS = {Fp4MarlinWeight: 4, Fp4MarlinVllm033Weight: 4, Fp8MarlinWeight: 8}
ACROSS = 5  # the same of codes that cross words
WIDER: dict[type[Weight], int] = {Exl2Weight: 9, Exl2KernelWeight: 13, Fp8MarlinWeight: 7, Marlin24Weight: 14}


def slices(
    weight: Weight, dtype: torch.dtype, factors: Tensor | None = None, scratch: int | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Outputs [n0, n1) and what they mean, (n1 - n0, K) rounded once to a dtype, valid until the next.

    `factors`: (K,), by which inputs are multiplied first, and here the weight; before it is rounded.
    `scratch`: bytes of a slice, else as many as the device likes.
    """
    K, most = weight.layer.K, _most(weight, dtype, factors, scratch)
    found = list(ranges(weight, most, EVEN if weight.device.type == "cuda" else 1))
    rows = max((stop - start for start, stop in found), default=0)
    buffer = devices.in_large_pages(torch.empty(rows, K, dtype=dtype, device=weight.device))
    for start, stop in found:
        out = buffer[: stop - start]
        if factors is None:
            rounded(weight, start, out)
        else:
            multiplied(weight, start, out, factors)
        yield slice(start, stop), out


def rounded(weight: Weight, start: int, out: Tensor) -> None:
    """The outputs from `start` on, as many as `out` (n, K) has, rounded to its dtype.

    A GPU reads most weights as they lie, from any tile on. What it does not is cut first.
    """
    stored = weight.stored() if cuda.has_routines(*weight.fields().values(), out) else None
    if stored is None or not dequantize_stored(stored, out, start):
        outputs(weight, start, start + out.shape[0]).dequantize(out=out)


def multiplied(weight: Weight, start: int, out: Tensor, factors: Tensor) -> None:
    """The same outputs times the factors of their inputs (K,), rounded once."""
    stored = weight.stored() if cuda.has_routines(*weight.fields().values(), out) else None
    if stored is None or not dequantize_stored(stored, out, start, factors):
        torch.mul(outputs(weight, start, start + out.shape[0]).dequantize(), factors, out=out)


def _most(weight: Weight, dtype: torch.dtype, factors: Tensor | None, scratch: int | None) -> int:
    """How many outputs a slice has."""
    on_cpu, K = weight.device.type == "cpu", max(1, weight.layer.K)
    fits = (scratch if scratch is not None else IN_CACHE if on_cpu else SCRATCH) // (K * dtype.itemsize)
    if on_cpu:
        return fits
    apart = factors is not None and not isinstance(_as_stored(weight), StoredRows)
    spelled = _spelled(weight) + OF_FACTORS * apart
    return min(fits, MOST // (K * (dtype.itemsize + spelled)))


def reads_in_place(weight: Weight) -> bool:
    """Whether a GPU dequantizes a weight from the tensors that it holds, with no other memory."""
    if isinstance(weight, IN_PLACE):
        return True
    if isinstance(weight, CTPackTensorWeight):
        whole = weight.config.bits in WHOLE_BITS and weight.layer.K % WORD_BITS == 0
        return whole and cuda.has_routines(*weight.fields().values())
    return _as_stored(weight) is not None and _lies_in_whole_codes(weight)


def _as_stored(weight: Weight) -> Stored | None:
    """How a weight lies, where a GPU reads it so."""
    return weight.stored() if cuda.has_routines(*weight.fields().values()) else None


def _lies_in_whole_codes(weight: Weight) -> bool:
    stored = weight.stored()
    if isinstance(stored, StoredSparse):
        return False  # its codes are put into order first
    if isinstance(stored, StoredCodes):
        return holds_whole_codes(stored.codes.packing) or runs_down(stored.codes.packing)
    return stored is not None


def _takes_a_byte(weight: Weight) -> bool:
    """Whether a GPU with routines needs a byte a code besides, for words in plain order or for scales."""
    if isinstance(weight, ExllamaWeight):
        return weight.config.bits in (2, 4)
    if isinstance(weight, GPTQMarlinWeight):
        return weight.config.bits == 4 and weight.padded_shape == weight.shape
    if isinstance(weight, Fp4MarlinWeight | Fp8MarlinWeight):  # padding is spelled out
        return bool(weight.qweight.nbytes * 8 == BITS[type(weight)] * weight.layer.N * weight.layer.K)
    return isinstance(weight, OF_TWO_SCALES) or isinstance(weight.stored(), StoredSparse)


def _spelled(weight: Weight) -> int:
    """Bytes a code that come and go while a slice is dequantized."""
    if reads_in_place(weight):
        return 0
    if cuda.has_routines(*weight.fields().values()) and _takes_a_byte(weight):
        return 1
    crosses = weight.stored() is not None and not _lies_in_whole_codes(weight)
    return ACROSS if crosses else WIDER.get(type(weight), SPELLED)
