"""Checkpoints written again: in another format, proven to mean the same."""

from qload.conversion.convert import convert
from qload.conversion.report import Conversion, ConvertedLayer

__all__ = ["Conversion", "ConvertedLayer", "convert"]
