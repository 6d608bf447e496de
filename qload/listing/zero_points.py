"""Stored zero points of a layer: convention, and runs of groups with a test for symmetry."""

from collections.abc import Iterator

import torch
from torch import Tensor

from qload.formats import AWQConfig, GPTQConfig
from qload.layouts import Packing, Stored, ZeroPoints, awq, gptq
from qload.loader import LayerDescription
from qload.storage import WeightStorage, rows


def convention(layer: LayerDescription) -> tuple[ZeroPoints, Packing] | None:
    """Convention and packing of a layer's zero points; None without stored zero points."""
    config = layer.format.config
    if isinstance(config, GPTQConfig):
        return config.zeros, gptq.columns(config.bits)
    if isinstance(config, AWQConfig) and config.zero_point:
        return Stored(), awq.columns(config.bits)
    return None


def symmetric(storage: WeightStorage, layer: LayerDescription) -> Iterator[tuple[int, Tensor, bool]]:
    """Yield (first group, packed zero points, whether all are 2**(bits - 1)) of each run of groups."""
    stored = convention(layer)
    if stored is None:
        return
    zeros, packing = stored
    middle = zeros.write(torch.full((1, layer.N), 2 ** (packing.bits - 1)), packing)
    for start, run in words(storage, layer):
        yield start, run, bool((run == middle).all())


def words(storage: WeightStorage, layer: LayerDescription) -> Iterator[tuple[int, Tensor]]:
    """Yield (first group, packed zero points) of each run of groups."""
    return rows(storage, layer.names.full("qzeros"))
