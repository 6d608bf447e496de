"""What carries a layout and a meaning out: one file per device, and `choice`, the one place that decides.

`reference` does everything in plain torch; where the native modules were built, `cpu` and `cuda` do the same
bits at the speed of memory.
"""

from qload.devices.choice import (
    copy_from_host,
    dequantize,
    dequantize_rows,
    dequantize_stored,
    dequantize_words,
    file_reader,
    has_routines,
    move,
    move_digits,
    move_from_file,
    pack,
    reads_stored,
    repack,
    unpack,
)
from qload.devices.codes import CodesInWords, LazyCodes, check_codes, check_integers, plain, stood_for, values
from qload.devices.cpu_files import CpuFileMover, FileMove, file_mover
from qload.devices.cuda_current import stream_on
from qload.devices.cuda_files import CudaFileReader
from qload.devices.large_pages import in_large_pages, writable
from qload.devices.meaning import Meaning, ZeroRule, run_of
from qload.devices.operands import (
    CodeValues,
    Stored,
    StoredCodes,
    StoredRows,
    StoredSparse,
    StoredStreams,
    StoredTable,
    meaning_of,
)
from qload.devices.reference import rows_of_codes
from qload.devices.tensors import check_writable, shares_memory

__all__ = [
    "CodeValues",
    "CodesInWords",
    "CpuFileMover",
    "CudaFileReader",
    "FileMove",
    "LazyCodes",
    "Meaning",
    "Stored",
    "StoredCodes",
    "StoredRows",
    "StoredSparse",
    "StoredStreams",
    "StoredTable",
    "ZeroRule",
    "check_codes",
    "check_integers",
    "check_writable",
    "copy_from_host",
    "dequantize",
    "dequantize_rows",
    "dequantize_stored",
    "dequantize_words",
    "file_mover",
    "file_reader",
    "has_routines",
    "in_large_pages",
    "meaning_of",
    "move",
    "move_digits",
    "move_from_file",
    "pack",
    "plain",
    "reads_stored",
    "repack",
    "rows_of_codes",
    "run_of",
    "shares_memory",
    "stood_for",
    "stream_on",
    "unpack",
    "values",
    "writable",
]
