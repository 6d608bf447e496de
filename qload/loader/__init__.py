"""Loaders of typed weights from named tensors: the interface, and the loader of all formats."""

from qload.loader.base import Blocks, LoadPlan, Part, Split, WeightsLoader, split_blocks
from qload.loader.description import ConfiguredFormat, DialectRecogniser, LayerDescription, RecognisedFormat
from qload.loader.formats import FormatLoader
from qload.loader.heads import Heads
from qload.loader.modules import ModuleLoader, UnreadLoader
from qload.loader.source import Rectangle, TensorSource, WrappedSource

__all__ = [
    "Blocks",
    "ConfiguredFormat",
    "DialectRecogniser",
    "FormatLoader",
    "Heads",
    "LayerDescription",
    "LoadPlan",
    "ModuleLoader",
    "Part",
    "RecognisedFormat",
    "Rectangle",
    "Split",
    "TensorSource",
    "UnreadLoader",
    "WeightsLoader",
    "WrappedSource",
    "split_blocks",
]
