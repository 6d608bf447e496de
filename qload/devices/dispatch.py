"""Choice of the code for an operation on tensors: the routine of their device, or plain torch.

Four operations: move (elements from order to order), pack and unpack (codes and words), dequantize; and
copies from the host.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from qload.devices import cpu, cuda, reference
from qload.devices.cuda import CudaFileReader
from qload.devices.cuda_stored import dequantize_stored as _dequantize_stored
from qload.devices.operands import CodesInWords, CodeValues, Meaning, Stored, check_codes, meaning_of, plain
from qload.sentences import AxisDigits, Digit, WordSentence, strides


def routines(tensor: Tensor) -> ModuleType:
    """Module with the routines for a tensor's device; a routine without support returns False or None."""
    return cuda if tensor.is_cuda else cpu


def has_routines(*tensors: Tensor) -> bool:
    """Return whether native code takes these tensors."""
    able: bool = routines(tensors[0]).has_routines(*tensors)
    return able


def move(source: Tensor, target: Tensor, size: dict[str, int], left: AxisDigits, right: AxisDigits) -> None:
    """Move the elements of a tensor, whose axes have the digits `left`, to the order of `right`."""
    here, there = strides(left, size, source.stride()), strides(right, size, target.stride())
    digits = [Digit(size[digit], here[digit], there[digit]) for digit in size]
    if not routines(target).move(source, target, 8 * source.itemsize, digits):
        reference.move(source, target, size, left, right)


def move_digits(source: Tensor, target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
    """Move elements of `bits` bits by digits to new memory; False without a write."""
    done: bool = routines(target).move(source, target, bits, digits)
    return done


def move_from_file(source: tuple[int, int, int], target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
    """As `move_digits`, from an open file's (descriptor, begin, bytes); after False `target` is invalid."""
    return not target.is_cuda and cpu.move_from_file(source, target, bits, digits)


def pack(packing: WordSentence, codes: Tensor, words: Tensor) -> None:
    """Pack int32 codes into words; ArgumentError for a code beyond its bits."""
    seen = routines(words).pack(packing, codes, words)
    if seen is None or not 0 <= seen < 2**packing.bits:
        check_codes(codes, packing.bits)
    if seen is None:
        reference.pack(packing, codes, words)


def unpack(packing: WordSentence, words: Tensor, codes: Tensor) -> None:
    """int32 words -> codes, int32 or uint8."""
    if not routines(codes).unpack(packing, words, codes):
        reference.unpack(packing, words, codes)


def copy_from_host(
    memory: Tensor, places: Sequence[slice], targets: Sequence[Tensor], onto: torch.cuda.Stream
) -> None:
    """Bytes of pinned memory to tensors of a CUDA device, in one piece each, on a stream; nobody waits."""
    if cuda.copy_from_host(memory, places, targets, onto):
        return
    with torch.cuda.stream(onto):
        for place, target in zip(places, targets, strict=True):
            target.copy_(memory[place].view(target.dtype).view(target.shape), non_blocking=True)


def file_reader(device: torch.device) -> CudaFileReader | None:
    """Start threads that read files to a CUDA device without Python's lock; None without the module."""
    found = cuda.module()
    return CudaFileReader(found, device) if hasattr(found, "FileReader") else None


def dequantize(codes: CodeValues, out: Tensor) -> None:
    """Dequantize codes in float32, rounded once to `out` (N, K)."""
    meaning = meaning_of(codes) if has_routines(out, codes.scales) else None
    if meaning is None or not _natively(codes, meaning, out):
        reference.dequantize(codes, out)


def dequantize_words(codes: CodesInWords, meaning: Meaning, out: Tensor) -> bool:
    """Dequantize codes in words in one pass to `out`; False without a write."""
    done: bool = routines(out).dequantize_words(codes, meaning, out)
    return done


def dequantize_rows(codes: Tensor, bits: int, meaning: Meaning, high_first: bool, out: Tensor) -> bool:
    """Dequantize codes in bytes in plain order, row by row; False without a write."""
    done: bool = routines(out).dequantize_rows(codes, bits, meaning, high_first, out)
    return done


def dequantize_stored(stored: Stored | None, out: Tensor) -> bool:
    """Dequantize a weight from its stored tensors; False if its device has no routine for them."""
    return stored is not None and out.is_cuda and _dequantize_stored(stored, out)


def reads_stored(*tensors: Tensor) -> bool:
    """Return whether the device of all these tensors reads weights as stored."""
    return tensors[0].is_cuda and cuda.has_routines(*tensors)


def _natively(codes: CodeValues, meaning: Meaning, out: Tensor) -> bool:
    here = routines(out)
    if isinstance(codes.codes, Tensor):
        return bool(here.dequantize_numbers(codes.codes, meaning, out))
    if codes.codes.dequantize(meaning, out):
        return True
    return here is cuda and bool(cuda.dequantize_numbers(plain(codes.codes), meaning, out))
