"""Where tensors are: in memory, or in safetensors files that are checked before they are trusted."""

from qload.storage.agreement import check_index, folder_notes
from qload.storage.files import is_directory, is_taken, read_whole, special, status
from qload.storage.header import DTYPES, Entry, Header, parse_header, read_header
from qload.storage.headers import read_headers
from qload.storage.hostile_json import parse_json
from qload.storage.hub_cache import snapshot
from qload.storage.locate import CheckpointFiles, locate
from qload.storage.memory import MemoryStorage
from qload.storage.protocol import (
    AskedBytes,
    FillingStorage,
    TensorInfo,
    WeightStorage,
    check_name,
    metadata_of,
)
from qload.storage.ranges import FileRange, FileRanges
from qload.storage.remote import Place, RemoteFile, RemoteFolder
from qload.storage.rows import rows
from qload.storage.safetensors import SafetensorsStorage

__all__ = [
    "DTYPES",
    "AskedBytes",
    "CheckpointFiles",
    "Entry",
    "FileRange",
    "FileRanges",
    "FillingStorage",
    "Header",
    "MemoryStorage",
    "Place",
    "RemoteFile",
    "RemoteFolder",
    "SafetensorsStorage",
    "TensorInfo",
    "WeightStorage",
    "check_index",
    "check_name",
    "folder_notes",
    "is_directory",
    "is_taken",
    "locate",
    "metadata_of",
    "parse_header",
    "parse_json",
    "read_header",
    "read_headers",
    "read_whole",
    "rows",
    "snapshot",
    "special",
    "status",
]
