"""Checkpoints written again: in another format, or in the shares of ranks, proven to mean the same."""

from qload.conversion.convert import convert
from qload.conversion.report import Conversion, ConvertedLayer
from qload.conversion.shard import shard
from qload.conversion.shard_report import ShardedCheckpoint, ShardedLayer

__all__ = ["Conversion", "ConvertedLayer", "ShardedCheckpoint", "ShardedLayer", "convert", "shard"]
