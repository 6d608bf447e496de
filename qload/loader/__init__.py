"""From named tensors to typed weights: the five loads, and the one loader that serves all formats."""

from qload.loader.base import Blocks, Part, Split, WeightsLoader, split_blocks
from qload.loader.formats import FormatLoader
from qload.loader.modules import ModuleLoader
from qload.loader.source import TensorSource
from qload.loader.study import Room, Studied

__all__ = [
    "Blocks",
    "FormatLoader",
    "ModuleLoader",
    "Part",
    "Room",
    "Split",
    "Studied",
    "TensorSource",
    "WeightsLoader",
    "split_blocks",
]
