"""The CUDA module: move, pack and unpack, dequantize. Each says whether it did the work.

All run on the stream that is current on the tensors' device, and none waits for it but `pack`, whose caller
asks which bits the codes had.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qload.devices.operands import CodesInWords, Meaning
from qload.devices.tensors import FLOATS, address, is_plain
from qload.native import is_on, load
from qload.sentences import WORD_BITS, Digit, WordSentence
from qload.sentences.strided_digits import (
    WHOLE_BITS,
    Axis,
    axis_digits,
    holds_whole_codes,
    in_common,
    inverse_digits,
    to_strided,
)

# What torch's own generated code calls; a build of torch without CUDA has neither.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_empty_strided: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
RUN = 16  # bytes that numbers are read and written by
MOVED = (*WHOLE_BITS, 16, 32)  # bits of elements that the module moves
CODES = {torch.uint8: 1, torch.int8: -1, torch.int16: -2, torch.int32: -4, torch.int64: -8, torch.bool: 1}
IN_ORDER = 0x543210  # hex digit i: where bit i of a column's number goes in a kernel's order
NO_ZEROS, CONSTANT, WORDS, NUMBERS = range(4)  # kinds of zero points
LOOKED, PAIRS = 2, 3  # how bytes hold codes, see rows.cuh
ROWS = {8: (LOOKED, 8), 4: (PAIRS, 4)}  # the same of words in plain order, by their bits
_RUNS: dict[tuple[str, bool, int, int], bool] = {}  # plain, for what traces a model to look into
log: logging.Logger = logging.getLogger("qload")
READ_BYTES = 4 << 20  # bytes that a thread reads at once: what is copied next is still in a cache
THREADS = 8
DeviceRange = tuple[int, int, int, int, int, int]
"""Descriptor, offset, bytes, address of the device, number of such runs, and their distance in the file."""


def empty_rows(like: Tensor, rows: int, columns: int) -> Tensor:
    """Uninitialized (rows, columns) in the dtype of `like`, on its device, the current one."""
    if _empty_strided is None or not like.is_cuda:
        return like.new_empty(rows, columns)
    made: Tensor = _empty_strided((rows, columns), (columns, 1), like.dtype)
    return made


def stream_on(device: torch.device) -> int:
    """Current stream of a device."""
    if raw_stream is None or device.index is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(raw_stream(device.index))


def stream(tensor: Tensor) -> int:
    """Current stream of a tensor's device."""
    return stream_on(tensor.device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context with a device as the current one."""
    if current_device is not None and device.index == current_device():
        return nullcontext()
    return torch.cuda.device(device)


def move(
    source: Tensor,
    target: Tensor,
    bits: int,
    digits: Sequence[Digit],
    rows: tuple[Tensor, Sequence[int]] | None = None,
) -> bool:
    """Copy elements: target[digits] = source[digits]; `rows`: starts in `source`, and counts of digits."""
    cuda = module_for(source, target)
    if cuda is None:
        return False
    if bits == 2 * WORD_BITS:
        bits, digits = WORD_BITS, [Digit(2, 1, 1), *(Digit(size, 2 * a, 2 * b) for size, a, b in digits)]
    if bits not in MOVED or target.data_ptr() % (WORD_BITS // 8):
        return False
    starts, counts = rows or (None, [0] * len(digits))
    quads = [(*digit, count) for digit, count in zip(digits, counts, strict=True)]
    with on_device(target.device):
        cuda.move(bits, quads, source.data_ptr(), address(starts), target.data_ptr(), stream(target))
    return True


def pack(packing: WordSentence, codes: Tensor, words: Tensor) -> int | None:
    """Pack int32 codes into words; returns the union of their bits, None without a native routine."""
    if not holds_whole_codes(packing):
        return None
    bits, (rows, columns) = packing.bits, axis_digits(packing.codes, tuple(codes.shape))
    if codes.stride(1) != 1:
        codes, rows, columns = codes.T, columns, rows
    (R, C), per_word = codes.shape, WORD_BITS // bits
    cuda = module_for(codes, words)
    if cuda is None or C % per_word or not codes.is_contiguous():
        return None
    codes = codes if codes.data_ptr() % RUN == 0 else codes.clone()
    plain, seen = codes.new_empty((R, C // per_word)), codes.new_zeros(1)
    with torch.cuda.device(codes.device):
        cuda.narrow(bits, codes.data_ptr(), plain.numel(), plain.data_ptr(), seen.data_ptr(), stream(codes))
    return int(seen) if move(plain, words, bits, inverse_digits(to_strided((C, 1), rows, columns))) else None


def unpack(packing: WordSentence, words: Tensor, codes: Tensor) -> bool:
    """Unpack words into new codes."""
    (R, C), bits = codes.shape, packing.bits
    cuda = module_for(words, codes)
    if cuda is None or not holds_whole_codes(packing) or C % (WORD_BITS // bits) or not codes.is_contiguous():
        return False
    if codes.dtype != torch.int32 or codes.data_ptr() % RUN:  # it writes numbers of 32 bits, a run at a time
        return False
    whole = words.contiguous()
    plain = words.new_empty((R, C // (WORD_BITS // bits)))
    if not move(whole, plain, bits, to_strided((C, 1), *axis_digits(packing.codes, (R, C)))):
        return False
    with torch.cuda.device(codes.device):
        cuda.widen(bits, plain.data_ptr(), plain.numel(), codes.data_ptr(), stream(codes))
    return True


def repack(source: CodesInWords, target: WordSentence, words: Tensor) -> bool:
    """Repack words from one packing to another; False if that needs the codes as numbers."""
    packing, bits = source.packing, target.bits
    if packing.bits != bits or not (holds_whole_codes(packing) and holds_whole_codes(target)):
        return False
    here = axis_digits(packing.codes, packing.shape_of_codes(source.words.shape))
    there = axis_digits(target.codes, source.shape)
    if source.order is not None:
        return _gather(source, here, there[:: -1 if source.turned else 1], bits, words)
    digits = in_common(here[::-1] if source.turned else here, there)
    return digits is not None and move(source.words.contiguous(), words, bits, digits)


def _gather(
    source: CodesInWords, lying: Sequence[Axis], there: Sequence[Axis], bits: int, words: Tensor
) -> bool:
    """Pack rows order[0], order[1], ... of codes; `lying`: digits of rows and columns in the words.

    Words that hold codes of several rows are brought into row-major order first: two passes over memory
    where one would read every word as often as it has codes.
    """
    order, lain, (rows, columns) = source.order, source.words.contiguous(), there
    length = prod(digit.size for digit in lying[1])
    if order is None or module_for(lain, words, order) is None or length % (WORD_BITS // bits):
        return False
    plain = lain.new_empty(lain.shape)
    if not move(lain, plain, bits, to_strided((length, 1), *lying)):
        return False
    starts, digits, counts, reached = order.long() * length, [], [], 1
    for size, place in rows:
        digits.append(Digit(size, reached * length, place))
        counts.append(reached)
        reached *= size
    across = inverse_digits(to_strided((1,), columns))
    return move(plain, words, bits, [*digits, *across], (starts, [*counts, *(0 for _ in across)]))


def copy_from_host(
    memory: Tensor, places: Sequence[slice], targets: Sequence[Tensor], onto: torch.cuda.Stream
) -> bool:
    """Copy bytes of pinned memory to contiguous tensors; False without a module."""
    found = module()
    if found is None:
        return False
    first = memory.data_ptr()
    runs = [
        (target.data_ptr(), first + place.start, place.stop - place.start)
        for place, target in zip(places, targets, strict=True)
    ]
    found.copy(runs, onto.cuda_stream)
    return True


def dequantize_words(codes: CodesInWords, meaning: Meaning, out: Tensor) -> bool:
    """Codes in words -> floats, rows of `out`."""
    packing = codes.packing
    if not holds_whole_codes(packing) or tuple(out.shape) != codes.shape:
        return False
    if codes.order is not None:
        ordered = _in_order(codes) if codes.turned else None
        return ordered is not None and dequantize_words(ordered, meaning, out)
    cuda, bits, (N, K) = module_for(codes.words, out, *meaning.tensors()), packing.bits, out.shape
    if cuda is None or not _takes(meaning, out) or K % (WORD_BITS // bits):
        return False
    if meaning.lookup is not None and bits in ROWS:
        plain = in_rows(codes)
        return plain is not None and _dequantize_bytes(plain, *ROWS[bits], meaning, out)
    axes = axis_digits(packing.codes, packing.shape_of_codes(codes.words.shape))
    row_bits = distance_of_rows(K)
    digits = to_strided((1 << row_bits, 1), *(axes[::-1] if codes.turned else axes))
    words, (meant, kept) = codes.words.contiguous(), _meant(cuda, meaning)
    with torch.cuda.device(out.device):
        at = words.data_ptr(), N, K, FLOATS.index(out.dtype), out.data_ptr(), stream(out)
        done = cuda.dequantize(bits, [(*digit, 0) for digit in digits], row_bits, meant, *at)
    del kept  # what the kernel reads lived until its launch
    return bool(done)


def distance_of_rows(K: int) -> int:
    """Exponent of the distance of rows of codes, 2**this, at least a word: a place has a row and a column."""
    return max(K - 1, WORD_BITS // 2 - 1).bit_length()


def _in_order(codes: CodesInWords) -> CodesInWords | None:
    """Copy codes to their own words, in order and row by row; None if rows do not fill words."""
    bits, (rows, columns) = codes.packing.bits, codes.shape
    per_word = WORD_BITS // bits
    if columns % per_word:
        return None
    plain = WordSentence(bits, "r (cp i) -> r cp (i)", i=per_word)
    words = codes.words.new_empty(plain.shape_of_words((rows, columns)))
    return CodesInWords(plain, words) if repack(codes, plain, words) else None


def in_rows(codes: CodesInWords) -> Tensor | None:
    """Codes (R, C) as bytes in plain order, (R, C * bits / 8), of four bits the first in the low ones."""
    ordered = _in_order(codes) if holds_whole_codes(codes.packing) else None
    return None if ordered is None else ordered.words.view(torch.uint8)


def dequantize_rows(codes: Tensor, bits: int, meaning: Meaning, high_first: bool, out: Tensor) -> bool:
    """Dequantize codes of 8 or 4 bits, in bytes row by row, to rows of `out`."""
    if bits == 8:
        return dequantize_numbers(codes, meaning, out)
    return bits == 4 and _dequantize_bytes(codes, PAIRS + high_first, 4, meaning, out)


def _dequantize_bytes(codes: Tensor, source: int, bits: int, meaning: Meaning, out: Tensor) -> bool:
    """Bytes, eight codes at a time; see rows.cuh for the source."""
    cuda = module_for(codes, out, *meaning.tensors())
    if cuda is None or codes.stride(1) != 1 or not _takes(meaning, out):
        return False
    if out.shape[1] * bits != 8 * codes.shape[1] or out.shape[0] != codes.shape[0]:
        return False
    meant, kept = _meant(cuda, meaning)
    with torch.cuda.device(out.device):
        at = *out.shape, FLOATS.index(out.dtype), out.data_ptr(), stream(out)
        done = cuda.dequantize_rows(source, codes.data_ptr(), codes.stride(0), 0, 0, meant, *at)
    del kept
    return bool(done)


def dequantize_numbers(codes: Tensor, meaning: Meaning, out: Tensor) -> bool:
    """Codes as numbers, of any strides -> floats, rows of `out`."""
    cuda = module_for(codes, out, *meaning.tensors())
    if cuda is None or codes.dtype not in CODES or not _takes(meaning, out):
        return False
    meant, kept = _meant(cuda, meaning)
    with torch.cuda.device(out.device):
        at = codes.data_ptr(), *out.shape, FLOATS.index(out.dtype), out.data_ptr(), stream(out)
        cuda.dequantize_single(CODES[codes.dtype], *codes.stride(), meant, *at)
    del kept
    return True


def _meant(cuda: ModuleType, meaning: Meaning) -> tuple[Any, Tensor | None]:
    """Arguments for the module's `Meaning`, and a tensor to keep alive until it was read."""
    made, (tables, groups) = cuda.Meaning(), meaning.scales.shape
    made.n_run, made.zero_bits, made.zero_word, made.zero_add, made.zero_mask = 1, 4, 0, 0, -1
    made.scale_places = made.zero_places = IN_ORDER
    zeros = None if meaning.zeros is None else meaning.zeros.to(torch.int32)
    made.scales, made.scale_type = meaning.scales.data_ptr(), FLOATS.index(torch.float32)
    made.scale_n = made.zero_n = 0 if tables == 1 and meaning.n_group is None else groups
    made.scale_k = made.zero_k = 1
    made.lookup, made.zeros = address(meaning.lookup), address(zeros)
    made.zeros_kind = NO_ZEROS if zeros is None else NUMBERS
    made.n_table, made.k_table = address(meaning.n_group), address(meaning.k_group)
    made.k_run = meaning.run
    made.divide, made.factor = meaning.divide, meaning.factor
    return made, zeros


def _takes(meaning: Meaning, out: Tensor) -> bool:
    whole = all(each.is_contiguous() for each in meaning.tensors())
    return whole and out.dtype in FLOATS and out.is_contiguous()


def has_routines(*tensors: Tensor) -> bool:
    """Return whether native code takes these tensors."""
    return module_for(*tensors) is not None


def runs_on(module: Any, device: torch.device) -> bool:
    """Return whether a module has machine code or PTX for the chip of a device."""
    built = module.chips, module.ptx, *torch.cuda.get_device_capability(device)
    if built not in _RUNS:
        _RUNS[built] = _runs_on(*built)
    return _RUNS[built]


def _runs_on(chips: str, ptx: str, major: int, minor: int) -> bool:
    """Return whether code runs on a chip: PTX on newer ones, a plain chip's on its later relatives."""
    here = 10 * major + minor
    family = [int(chip) for chip in chips.split() if not chip.endswith("a") and int(chip) // 10 == major]
    return f"{here}a" in chips.split() or any(code <= here for code in (*family, *map(int, ptx.split())))


def module() -> ModuleType | None:
    """CUDA module; None without it, and within `native.reference`."""
    return load("cuda").found if is_on() else None


def module_for(*tensors: Tensor) -> ModuleType | None:
    """CUDA module for tensors of one device; None without it, while compiling, for other chips or memory."""
    found = module()
    if found is None or torch.compiler.is_compiling():
        return None
    device = tensors[0].device
    plain = all(is_plain(tensor, "cuda") and tensor.device == device for tensor in tensors)
    return found if plain and runs_on(found, device) else None


class CudaFileReader:
    """Threads that read ranges of files into pinned memory, and copy them to a device on their own streams.

    Parameters
    ----------
    module
        The CUDA module.
    device
        By its number.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.device = device
        self._memory = pinned(THREADS * module.FileReader.buffers * READ_BYTES)
        with on_device(device):
            self._reader = module.FileReader(self._memory.data_ptr(), READ_BYTES, THREADS)

    def begin(self, ranges: Sequence[DeviceRange], home: torch.cuda.Stream) -> int:
        """Begin to read to memory that is new on the stream `home`; returns a ticket for one `wait`."""
        with on_device(self.device):
            ticket: int = self._reader.begin(ranges, home.cuda_stream)
        return ticket

    def wait(self, ticket: int) -> bool:
        """Let the current stream wait for the copies of a ticket; returns whether all ranges were read.

        RuntimeError where the device failed.
        """
        with on_device(self.device):
            place, number, told = self._reader.wait(ticket, stream_on(self.device))
        if told:
            raise RuntimeError(f"range {place} of ticket {ticket} could not be copied: {told}")
        if place >= 0:
            reason = os.strerror(number) if number else "the file ended"
            log.debug("range %d of ticket %d was not read: %s", place, ticket, reason)
        return bool(place < 0)

    def close(self) -> None:
        """Cancel pending reads and wait for the running ones; later, no memory is written."""
        self._reader.close()


def pinned(nbytes: int) -> Tensor:
    """Pinned memory of the host."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
