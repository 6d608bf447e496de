"""Header of a new safetensors file, and the order of its tensors.

Every tensor starts at a multiple of its element size, as readers that map the file expect. The format is
described in `header`.
"""

import json
from collections.abc import Mapping

from qload.storage.header import LENGTH_BYTES
from qload.storage.protocol import DTYPES, TensorInfo

ALIGNMENT_BYTES = 8  # size of the largest element type
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def file_order(infos: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """Return tensors in the order of their data: as given, but sizes that are no multiple of 8 bytes last.

    Of these, large element types come first.
    """
    odd = {name for name, info in infos.items() if info.nbytes % ALIGNMENT_BYTES}
    last = sorted(odd, key=lambda name: (-infos[name].stored_dtype.itemsize, name))
    return {name: infos[name] for name in (*(name for name in infos if name not in odd), *last)}


def encode_header(infos: Mapping[str, TensorInfo]) -> bytes:
    """Encode the header of a file with these tensors, in the order of their data.

    Its length, then JSON, padded with spaces to a multiple of 8 bytes.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, info in infos.items():
        span, dtype = [start, start + info.nbytes], DTYPE_NAMES[info.stored_dtype]
        entries[name] = {"dtype": dtype, "shape": list(info.shape), "data_offsets": span}
        start += info.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
