"""Weights whose codes lie in rows, for the CPU module: some rows become floats in the cache, nowhere else.

nf4 and fp4, MXFP4 and NVFP4, FP8, 8-bit integers, and packed integers whose words run along the inputs need
no order of their own for that.
"""

import weakref
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qload.devices.cpu import has_routines
from qload.devices.meaning import Meaning
from qload.devices.operands import meaning_of
from qload.devices.tensors import dense
from qload.formats import (
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackTensorWeight,
    CTPackWeight,
    EETQWeight,
    Fp8Weight,
    ModelOptAWQWeight,
    ModelOptNVFP4Weight,
    MXFP8Weight,
)
from qload.layouts import ClippedCodes, NibblePairs, PackedCodes
from qload.sentences.digits import stream_axis
from qload.spec import Codes, Weight

BYTE = 8
SIGNED = torch.arange(2**BYTE, dtype=torch.uint8).view(torch.int8).float()  # of each byte
ROW_TYPES: tuple[type[Weight], ...] = (  # formats that store rows, or of which some layers do
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackTensorWeight,
    CTPackWeight,
    EETQWeight,
    Fp8Weight,
    ModelOptAWQWeight,
    ModelOptNVFP4Weight,
    MXFP8Weight,
)


@dataclass(frozen=True)
class CodeRows:
    """Packed codes of each output, one after another: `bytes` uint8 (N, row bytes), rows of any stride.

    `bits` of a code, 2 to 8; `high_first`: of 4 bits, the first of two lies in the high half.
    """

    bytes: Tensor
    bits: int
    high_first: bool
    meaning: Meaning


class KeptRows:
    """What `rows_of` says of a layer's weight, found again only where a tensor is another or written to.

    torch counts what is written in place, but for `tensor.data` and tensors made in inference mode: nothing
    is kept of the latter, and a change of the former is not seen.
    """

    def __init__(self) -> None:
        self._seen: tuple[tuple[weakref.ref[Tensor], int, int], ...] = ()
        self._rows: CodeRows | None = None

    def of(self, weight: Weight) -> CodeRows | None:
        """How the codes of a matrix lie in rows, and what they mean; None where they do not."""
        tensors = weight.fields().values()
        if any(tensor.is_inference() for tensor in tensors):
            return rows_of(weight)
        seen = tuple((weakref.ref(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors)
        if seen != self._seen:
            self._rows, self._seen = rows_of(weight), seen
        return self._rows


def rows_of(weight: Weight) -> CodeRows | None:
    """How the codes of a matrix lie in rows, and what they mean; None where they do not."""
    if not isinstance(weight, ROW_TYPES) or weight.input_factors is not None:
        return None
    codes = weight.codes()
    found = _bytes(codes)
    meaning = None if found is None else meaning_of(codes)
    if found is None or meaning is None or not all(each.is_contiguous() for each in meaning.tensors()):
        return None
    if isinstance(codes.codes, Tensor) and codes.codes.dtype == torch.int8:
        if meaning.lookup is not None:
            return None
        meaning = replace(meaning, lookup=SIGNED)
    high_first = isinstance(codes.codes, NibblePairs) and codes.codes.high_first
    bits = BYTE if isinstance(codes.codes, Tensor) else codes.bits
    made = CodeRows(found, bits, high_first, meaning)
    return made if has_routines(found, *meaning.tensors()) else None


def _bytes(codes: Codes) -> Tensor | None:
    """Rows of bytes, where codes lie so."""
    held = codes.codes
    if isinstance(held, Tensor):
        plain = held.dtype in (torch.uint8, torch.int8) and held.ndim == 2 and held.stride(1) == 1
        return held.view(torch.uint8) if plain else None
    if isinstance(held, NibblePairs):
        return held.bytes if held.bytes.stride(1) == 1 else None
    packed = held.packed if isinstance(held, ClippedCodes) else held
    if not isinstance(packed, PackedCodes) or packed.order is not None or packed.turned:
        return None
    return dense(packed.words).view(torch.uint8) if stream_axis(packed.packing) == 1 else None
