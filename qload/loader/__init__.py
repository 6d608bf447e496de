"""From named tensors to typed weights: the five loads, and the one loader that serves all formats."""

from qload.loader.base import Blocks, LoadPlan, Part, Split, WeightsLoader, split_blocks
from qload.loader.description import ConfiguredFormat, LayerDescription
from qload.loader.formats import FormatLoader
from qload.loader.heads import Heads
from qload.loader.modules import ModuleLoader
from qload.loader.source import Rectangle, TensorSource

__all__ = [
    "Blocks",
    "ConfiguredFormat",
    "FormatLoader",
    "Heads",
    "LayerDescription",
    "LoadPlan",
    "ModuleLoader",
    "Part",
    "Rectangle",
    "Split",
    "TensorSource",
    "WeightsLoader",
    "split_blocks",
]
