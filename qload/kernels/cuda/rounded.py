"""A weight rounded to the type of its activations, for the vendor's product.

Bit for bit as `Weight.dequantize` has it, which asks every device in turn. Here, inside of a CUDA operator,
the device is decided; some columns alone may be asked for, and codes that CUDA reads in no words are spelled
out.
"""

import torch
from torch import Tensor

from qload.devices import cuda, meaning_of
from qload.devices.cuda_stored import dequantize_stored
from qload.spec import Weight


def rounded(weight: Weight, dtype: torch.dtype, columns: slice | None = None) -> Tensor:
    """(N, K) in a dtype, in one pass on the device; `columns`: these outputs alone, whole tiles of them."""
    start, stop, _ = (columns or slice(None)).indices(weight.layer.N)
    out = torch.empty(stop - start, weight.layer.K, dtype=dtype, device=weight.device)
    stored = weight.stored()
    if stored is not None and dequantize_stored(stored, out, start):
        return out
    codes = weight.codes()
    meaning = meaning_of(codes)
    if columns is None and meaning is not None and cuda.dequantize_numbers(codes.plain(), meaning, out):
        return out
    return weight.dequantize(dtype)[start:stop]
