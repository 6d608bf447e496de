"""Tiny random models of every type: tensors by the names that transformers stores them under."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qload import MemoryStorage, Weights, architecture_of, loader_from_config
from qload.experts import with_experts
from qload.parallel import ALONE, ProcessGroup
from qload.testing.tiny_checkpoint import TINY_SIZES as SIZES
from qload.testing.tiny_checkpoint import TYPE_ENTRIES as OWN
from qload.testing.tiny_checkpoint import tiny_config as config

__all__ = ["OWN", "SIZES", "config", "tensors", "weights"]


def tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """All that a checkpoint of a config has to hold, float32; norms lie about 1, matrices keep sizes."""
    generator, known = torch.Generator().manual_seed(seed), architecture_of(config)
    assert known is not None
    found = {}
    for name in known.required():
        shape = known.shape(name) or known.expected(name)
        assert shape is not None
        drawn = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            found[f"{name}.weight"] = drawn * shape[1] ** -0.5
        else:
            found[name] = 1 + drawn / 4 if name.endswith("norm.weight") else drawn / 4
    return found


def weights(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], group: ProcessGroup = ALONE, **options: Any
) -> Weights:
    """The tensors as a checkpoint of this config, for one rank."""
    loader = options.pop("loader", None) or loader_from_config(config.get("quantization_config"))
    known = architecture_of(config)
    storage = with_experts(MemoryStorage(tensors), dict(config))
    return Weights(storage, loader=loader, process_group=group, architecture=known, **options)
