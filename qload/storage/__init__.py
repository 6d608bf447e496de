"""Where tensors are: in memory, or in safetensors files that are checked before they are trusted."""

from qload.storage.header import DTYPES, Entry, Header, parse_header, read_header
from qload.storage.locate import CheckpointFiles, check_index, locate
from qload.storage.memory import MemoryStorage
from qload.storage.protocol import TensorInfo, WeightStorage, check_name
from qload.storage.safetensors import SafetensorsStorage

__all__ = [
    "DTYPES",
    "CheckpointFiles",
    "Entry",
    "Header",
    "MemoryStorage",
    "SafetensorsStorage",
    "TensorInfo",
    "WeightStorage",
    "check_index",
    "check_name",
    "locate",
    "parse_header",
    "read_header",
]
